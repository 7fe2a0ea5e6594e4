#include "optim/moment.h"

#include <ATen/ATen.h>

#include <limits>

#include "optim/rounding.h"

namespace fsdp::detail {

namespace {

constexpr auto kBlock = Moment::kBlock;
// The smallest number of float8_e4m3fn above 0, and its smallest number with three bits of
// mantissa.
constexpr double kSmallest = 1.0 / 512;
constexpr double kSmallestNormal = 1.0 / 64;

int64_t num_blocks(int64_t numel) {
  return (numel + kBlock - 1) / kBlock;
}

/// Returns a row for each block. Zeros fill up the last one.
at::Tensor in_blocks(const at::Tensor& floats) {
  const auto numel = floats.numel();
  const auto missing = num_blocks(numel) * kBlock - numel;
  return (missing == 0 ? floats : at::constant_pad_nd(floats, {0, missing})).view({-1, kBlock});
}

/// Returns for each block a power of two, by which its numbers are divided. Then the largest one is
/// above 128 and at most 256. It is rounded to a number from 128 to 256. That gives the same scale
/// again, or half of it, so nothing more is lost if what was read is written again.
at::Tensor scale_of(const at::Tensor& blocks) {
  constexpr int64_t kExponent = 0x7f800000;
  const auto largest = blocks.abs().amax(1).clamp_min_(std::numeric_limits<float>::min());
  largest.view(at::kInt).sub_(1).bitwise_and_(kExponent); // a power of two counts as one below it
  return largest.mul_(1.0 / 128);
}

/// Rounds floats to numbers of float8_e4m3fn. Those that are too small for three bits of mantissa
/// are multiples of kSmallest, as those in the first binade above them are: so they are moved there
/// and back.
void round_to_8_bits_(const at::Tensor& floats, const at::Tensor& random_bits) {
  const auto shift = (floats.abs() < kSmallestNormal).to(at::kFloat).mul_(kSmallestNormal);
  shift.mul_(floats.sign());
  floats.add_(shift);
  round_stochastically_(floats, random_bits, /*mantissa_bits=*/3);
  floats.sub_(shift);
}

} // namespace

void Moment::make(const at::Tensor& param, at::ScalarType dtype) const {
  values = at::zeros(param.sizes(), at::TensorOptions(param.device()).dtype(dtype));
  scale.reset();
  if (has_scales()) {
    scale = at::zeros({num_blocks(param.numel())}, values.options().dtype(at::kFloat));
  }
}

at::Tensor Moment::read(int64_t begin, int64_t end) const {
  const auto stored = values.view(-1).slice(0, begin, end);
  auto floats = stored.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  if (has_scales()) {
    const auto scales = scale.slice(0, begin / kBlock, num_blocks(end)).unsqueeze(1);
    floats = in_blocks(floats).mul(scales).view(-1).slice(0, 0, end - begin);
    if (is_square) {
      floats.square_();
    }
  }
  return floats;
}

void Moment::write(int64_t begin, at::Tensor floats, const at::Tensor& random_bits) const {
  const auto numel = floats.numel();
  const auto stored = values.view(-1).slice(0, begin, begin + numel);
  if (has_scales()) {
    if (is_square) {
      floats.sqrt_();
    }
    const auto blocks = in_blocks(floats);
    const auto scales = scale_of(blocks);
    scale.slice(0, begin / kBlock, begin / kBlock + scales.numel()).copy_(scales);
    blocks.div_(at::where(scales == 0, 1.0, scales).unsqueeze(1));
    if (is_square) {
      blocks.clamp_min_(kSmallest);
    }
    floats = blocks.view(-1).slice(0, 0, numel);
  }
  if (random_bits.defined() && has_scales()) {
    round_to_8_bits_(floats, random_bits);
  } else if (random_bits.defined() && values.scalar_type() == at::kBFloat16) {
    round_stochastically_(floats, random_bits, /*mantissa_bits=*/7);
  }
  stored.copy_(floats);
}

std::array<Moment, 2> moments_of(optim::LowPrecisionAdamWParamState& state) {
  return {
      Moment{state.exp_avg(), state.exp_avg_scale(), /*is_square=*/false},
      Moment{state.exp_avg_sq(), state.exp_avg_sq_scale(), /*is_square=*/true}};
}

} // namespace fsdp::detail
