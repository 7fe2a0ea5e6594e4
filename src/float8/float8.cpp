#include "float8/float8.h"

#include <ATen/ATen.h>

#include <limits>

namespace fsdp::detail {

namespace {

double largest_of(at::ScalarType dtype) {
  return dtype == at::kFloat8_e5m2 ? 57344 : 448;
}

/// Returns the largest magnitude of the values that share a scale, or 0 if there are none.
at::Tensor magnitudes(const at::Tensor& values, std::optional<int64_t> shared) {
  constexpr auto kLargest = std::numeric_limits<double>::infinity(); // this norm is the largest one
  const auto dims = shared ? at::OptionalIntArrayRef(*shared) : std::nullopt;
  return values.numel() == 0
             ? values.sum(dims, shared.has_value(), at::kFloat)
             : at::linalg_vector_norm(values, kLargest, dims, shared.has_value(), at::kFloat);
}

/// Rounds positive numbers up to powers of two. A number that is not finite becomes infinity.
/// Overwrites `numbers`.
at::Tensor powers_of_two(at::Tensor numbers) {
  constexpr int32_t kMantissa = 0x7fffff; // the bits below the exponent
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  numbers.nan_to_num_(kInfinity, kInfinity, kInfinity);
  numbers.view(at::kInt).add_(kMantissa).bitwise_and_(~kMantissa);
  return numbers;
}

/// Returns the power of two in bf16 for values in bf16: with a factor in fp32, torch would copy the
/// values to fp32.
at::Tensor factor_for(const at::Tensor& power, at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? power.to(at::kBFloat16) : power;
}

/// The dtype in which values are scaled. fp16 has too few powers of two.
at::ScalarType scaled_in(at::ScalarType dtype) {
  return dtype == at::kHalf ? at::kFloat : dtype;
}

} // namespace

Float8 Float8::t() const {
  return {data.t(), scale.dim() == 2 ? scale.t() : scale};
}

Float8 to_float8(const at::Tensor& values, std::optional<int64_t> shared, at::ScalarType dtype) {
  constexpr double kLeast = 0x1p-100; // so that 1 / scale is finite
  const auto scale =
      powers_of_two(magnitudes(values, shared).div_(largest_of(dtype)).clamp_min_(kLeast));
  return to_float8_by(scale, values, dtype);
}

Float8 to_float8_by(const at::Tensor& scale, const at::Tensor& values, at::ScalarType dtype) {
  const auto wide = values.to(scaled_in(values.scalar_type()));
  auto data = at::empty_like(wide, at::TensorOptions(dtype));
  // On a GPU one kernel reads the values and writes float8.
  at::mul_out(data, wide, factor_for(scale.reciprocal(), wide.scalar_type()));
  return {data, scale};
}

at::Tensor from_float8(const Float8& values, at::ScalarType dtype) {
  const auto wide = scaled_in(dtype);
  return values.data.to(wide).mul_(factor_for(values.scale, wide)).to(dtype);
}

at::Tensor float8_product(const Float8& a, const Float8& b, at::ScalarType dtype, bool fast) {
  if (!a.data.is_cuda()) {
    return a.data.to(at::kFloat).mm(b.data.to(at::kFloat)).mul(a.scale).mul(b.scale).to(dtype);
  }
  // The kernels want rows of the left matrix and columns of the right one to be contiguous. With a
  // scale for each row they only write bf16.
  const auto result = a.scale.dim() == 0 ? dtype : at::kBFloat16;
  return at::_scaled_mm(
             a.data.contiguous(), b.data.t().contiguous().t(), a.scale.contiguous(),
             b.scale.contiguous(), /*bias=*/{}, /*scale_result=*/{}, result, fast)
      .to(dtype);
}

} // namespace fsdp::detail
