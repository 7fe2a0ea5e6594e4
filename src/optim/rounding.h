#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>

#include "param/param_placement.h"

namespace fsdp::detail {

// Note [Stochastic rounding]
//
// The next number after a number in bf16 is larger by 1/128 to 1/256 of it. An update of AdamW is
// usually smaller than half of that, so rounding to the nearest number would drop it, step after
// step. Stochastic rounding goes up or down at random, more often to the nearer side, so that the
// result is right on average.
//
// The bits of a float, read as an integer, grow with its absolute value. So one adds random bits
// below the last bit that is kept, and then cuts those off.
//
// The random bits are a hash of the seed, the parameter, the step, and the number of the element in
// the whole parameter. No generator has a state that a checkpoint would have to hold, and it does
// not matter how many ranks share the parameter.

/// The numbers of this rank's elements of a parameter in the whole parameter, modulo 2^32.
class ElementNumbers {
 public:
  /// `local` is this rank's part of a tensor that is placed by `spec`; without one, it is the
  /// whole.
  ElementNumbers(const at::Tensor& local, const std::optional<TensorSpec>& spec);

  /// Returns those of the elements [begin, end), in row-major order, as a new tensor of 32-bit
  /// integers.
  at::Tensor slice(int64_t begin, int64_t end) const;

 private:
  int64_t first_ = 0;
  at::TensorOptions options_;
  at::Tensor numbers_; // if they do not follow each other
};

/// Three independent sets of 16 random bits for each element. Overwrites `numbers`.
std::array<at::Tensor, 3> random_bits(const at::Tensor& numbers, uint64_t key);

/// Rounds floats to numbers of `mantissa_bits`, not counting the leading 1, in place.
void round_stochastically_(
    const at::Tensor& values, const at::Tensor& random_bits, int mantissa_bits);

} // namespace fsdp::detail
