#include "optim/rounding.h"

#include <ATen/ATen.h>

#include <limits>

#include "layout/box.h"
#include "layout/mesh_layout.h"

namespace fsdp::detail {

namespace {

/// The same 32 bits as a signed number, as integer tensors have them.
int64_t as_signed(uint64_t value) {
  return static_cast<int32_t>(static_cast<uint32_t>(value));
}

/// The numbers of the elements of a box in a tensor of `sizes`.
at::Tensor numbers_of(
    const Box& box, const std::vector<int64_t>& sizes, const at::TensorOptions& options) {
  auto numbers = at::zeros({}, options);
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    const auto along =
        at::arange(box.offsets[dim], box.offsets[dim] + box.sizes[dim], options.dtype(at::kLong));
    numbers = numbers.unsqueeze(-1) * as_signed(sizes[dim]) + along.to(at::kInt);
  }
  return numbers;
}

/// If the boxes, in this order, are one run of the whole tensor, returns the number of its first
/// element.
std::optional<int64_t> first_of_run(
    const std::vector<LocalBox>& boxes,
    const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& local_sizes) {
  const auto first = grid_index(sizes, boxes.front().box.offsets);
  int64_t length = 0;
  for (const auto& [box, at] : boxes) {
    size_t dim = 0;
    while (dim < sizes.size() && box.sizes[dim] == 1) {
      ++dim;
    }
    for (++dim; dim < sizes.size(); ++dim) { // after the first dim that has several elements
      if (box.sizes[dim] != sizes[dim]) {
        return std::nullopt;
      }
    }
    if (grid_index(sizes, box.offsets) != first + length || grid_index(local_sizes, at) != length) {
      return std::nullopt;
    }
    length += box.numel();
  }
  return first;
}

void mix_(const at::Tensor& bits, int shift, uint64_t factor) {
  bits.bitwise_xor_(at::bitwise_right_shift(bits, shift).bitwise_and_(as_signed(~0U >> shift)));
  bits.mul_(as_signed(factor));
}

at::Tensor high_bits(const at::Tensor& bits) {
  return at::bitwise_right_shift(bits, 16).bitwise_and_(0xffff);
}

} // namespace

ElementNumbers::ElementNumbers(const at::Tensor& local, const std::optional<TensorSpec>& spec)
    : options_(at::TensorOptions(local.device()).dtype(at::kInt)) {
  if (!spec || local.numel() == 0) {
    return;
  }
  const auto boxes =
      local_boxes(spec->sizes, spec->placements, spec->mesh.shape(), spec->mesh.get_coordinate());
  if (const auto first = first_of_run(boxes, spec->sizes, local.sizes().vec())) {
    first_ = *first;
    return;
  }
  auto numbers = at::empty(local.sizes(), options_);
  for (const auto& [box, at] : boxes) {
    auto part = numbers;
    for (size_t dim = 0; dim < at.size(); ++dim) {
      part = part.narrow(static_cast<int64_t>(dim), at[dim], box.sizes[dim]);
    }
    part.copy_(numbers_of(box, spec->sizes, options_));
  }
  numbers_ = numbers.flatten();
}

at::Tensor ElementNumbers::slice(int64_t begin, int64_t end) const {
  return numbers_.defined() ? numbers_.slice(0, begin, end).clone()
                            : at::arange(end - begin, options_)
                                  .add_(as_signed(static_cast<uint64_t>(first_ + begin)));
}

std::array<at::Tensor, 3> random_bits(const at::Tensor& numbers, uint64_t key) {
  // The mixing of a well-known hash (lowbias32), with a key.
  numbers.mul_(as_signed(0x9e3779b9)).add_(as_signed(key));
  mix_(numbers, 16, 0x21f0aaad);
  mix_(numbers, 15, 0xd35a2d97);
  auto first = high_bits(numbers);
  auto second = at::bitwise_and(numbers.bitwise_xor_(at::bitwise_right_shift(numbers, 15)), 0xffff);
  return {std::move(first), std::move(second), high_bits(numbers.mul_(as_signed(0x2c1b3c6d)))};
}

void round_stochastically_(
    const at::Tensor& values, const at::Tensor& random_bits, int mantissa_bits) {
  constexpr int kRandomBits = 16;
  constexpr int kMantissaBits = 23; // of a float
  const auto dropped = kMantissaBits - mantissa_bits;
  const auto is_nan = values.isnan(); // a GPU's NaN has all bits, and would become 0
  values.view(at::kInt)
      .add_(random_bits, int64_t{1} << (dropped - kRandomBits))
      .bitwise_and_(-(int64_t{1} << dropped));
  values.masked_fill_(is_nan, std::numeric_limits<float>::quiet_NaN());
}

} // namespace fsdp::detail
