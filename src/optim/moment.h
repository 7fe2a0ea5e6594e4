#pragma once

#include <ATen/core/Tensor.h>
#include <fsdp/low_precision_adamw.h>

#include <array>
#include <cstdint>

namespace fsdp::detail {

/// A moment of AdamW as it is stored: in fp32, in bf16, or in 8 bits (float8_e4m3fn).
///
/// In 8 bits, each 256 elements that follow each other have a scale, a power of two. What was read
/// can be stored again without a change. The second moment is stored as its square root, which has
/// half its range, and never as 0 beside larger ones: AdamW divides by it.
struct Moment {
  static constexpr int64_t kBlock = 256;

  at::Tensor& values; // has the sizes of the parameter
  at::Tensor& scale;  // one for each block; undefined if there are no blocks
  bool is_square;

  /// Makes the tensors, with zeros.
  void make(const at::Tensor& param, at::ScalarType dtype) const;
  bool has_scales() const {
    return values.scalar_type() == at::kFloat8_e4m3fn;
  }
  /// Returns the elements [begin, end) as floats, in a new tensor. `begin` is where a block begins.
  at::Tensor read(int64_t begin, int64_t end) const;
  /// Stores `floats`, which it overwrites, rounded by these bits or, if they are undefined, to the
  /// nearest number.
  void write(int64_t begin, at::Tensor floats, const at::Tensor& random_bits) const;
};

/// The first and the second moment.
std::array<Moment, 2> moments_of(optim::LowPrecisionAdamWParamState& state);

} // namespace fsdp::detail
