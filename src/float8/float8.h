#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fsdp::detail {

/// Values in float8: `data` times `scale`. The scale is a tensor of fp32 that expands to the data.
struct Float8 {
  at::Tensor data;
  at::Tensor scale;

  /// Of a matrix.
  Float8 t() const;
};

/// The scales with which values fit into `dtype`, e4m3 or e5m2: the smallest powers of two. Values
/// along the dim `shared` have one, or all of them if it is empty. It is infinite where one of them
/// is not finite.
at::Tensor float8_scale(
    const at::Tensor& values, std::optional<int64_t> shared, at::ScalarType dtype);

/// Rounds to `dtype`. Where a scale is infinite, all values become NaN.
Float8 to_float8_by(const at::Tensor& scale, const at::Tensor& values, at::ScalarType dtype);

inline Float8 to_float8(
    const at::Tensor& values,
    std::optional<int64_t> shared,
    at::ScalarType dtype = at::kFloat8_e4m3fn) {
  return to_float8_by(float8_scale(values, shared, dtype), values, dtype);
}

/// Is exact in fp32 and bf16, unless the largest value was rounded up and overflows.
at::Tensor from_float8(const Float8& values, at::ScalarType dtype);

/// Returns the product of two matrices. Both have one scale, or `a` has one for each row and `b`
/// one for each column. `fast`: adds up less exactly, where the device knows how.
at::Tensor float8_product(const Float8& a, const Float8& b, at::ScalarType dtype, bool fast);

} // namespace fsdp::detail
