#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fsdp::detail {

/// Values in float8: `data` times `scale`. The scale is a tensor of fp32 that expands to the data.
struct Float8 {
  at::Tensor data;
  at::Tensor scale;

  /// Returns the transposed matrix. Only for two dims.
  Float8 t() const;
};

/// Rounds to `dtype`, e4m3 or e5m2. Values along the dim `shared` have one scale. If `shared` is
/// empty, all values have one scale. A scale is the smallest power of two that brings its values
/// into range. If one value is not finite, all values with its scale become NaN.
Float8 to_float8(
    const at::Tensor& values,
    std::optional<int64_t> shared,
    at::ScalarType dtype = at::kFloat8_e4m3fn);

/// Does the same with a given scale.
Float8 to_float8_by(const at::Tensor& scale, const at::Tensor& values, at::ScalarType dtype);

/// Returns the values in `dtype`. In fp32 and bf16 they are exact, unless the largest value was
/// rounded up and overflows.
at::Tensor from_float8(const Float8& values, at::ScalarType dtype);

/// Returns the product of two matrices. Both have one scale, or `a` has one for each row and `b`
/// one for each column. With `fast`, a device that can do so adds up faster and less exactly.
at::Tensor float8_product(const Float8& a, const Float8& b, at::ScalarType dtype, bool fast);

} // namespace fsdp::detail
