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

/// Rounds to `dtype`, e4m3 or e5m2. Values along the dim `shared` have one scale, or all of them if
/// it is empty. A scale is the smallest power of two that brings its values into range. If one of
/// them is not finite, they all become NaN.
Float8 to_float8(
    const at::Tensor& values,
    std::optional<int64_t> shared,
    at::ScalarType dtype = at::kFloat8_e4m3fn);

/// The same with a scale that is known.
Float8 to_float8_by(const at::Tensor& scale, const at::Tensor& values, at::ScalarType dtype);

/// Is exact in fp32 and bf16, unless the largest value was rounded up and overflows.
at::Tensor from_float8(const Float8& values, at::ScalarType dtype);

/// Returns the product of two matrices. Both have one scale, or `a` has one for each row and `b`
/// one for each column. `fast`: adds up less exactly, where the device knows how.
at::Tensor float8_product(const Float8& a, const Float8& b, at::ScalarType dtype, bool fast);

} // namespace fsdp::detail
