#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <fsdp/placement.h>

namespace fsdp::detail {

// Integer arithmetic for parts of tensors. No tensors, no files.

/// A rectangular part of a tensor.
struct Box {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  bool operator==(const Box&) const = default;

  int64_t numel() const;
  /// Returns the box that covers a whole tensor of `sizes`.
  static Box whole(const std::vector<int64_t>& sizes);
};

/// Returns the elements that both boxes contain, or nothing if there are none. Two boxes of a
/// scalar always share its one element.
std::optional<Box> intersection(const Box& first, const Box& second);

// Note [Tiles]
//
// A file may hold so many boxes that they cannot be compared in pairs. So `tile` adds up volumes.
// That alone would not find a box that is there twice while another one is missing. So the volumes
// are not the usual ones: each index along each dim gets a random number, the length from index a
// to index b is the difference of their numbers, and a volume is the product of lengths, modulo a
// prime. These volumes add up, too: if boxes make the whole, their volumes do. If some elements are
// in no box or in several, the difference is a polynomial of the random numbers that is not zero
// everywhere. Its degree is the number of dims, so it is zero by accident once in 2^55 cases.
// Nobody can prepare such a case, because the numbers differ from process to process.

/// Returns true if the boxes lie in a tensor of `sizes`, and each of its elements lies in exactly
/// one box.
bool tile(const std::vector<Box>& boxes, const std::vector<int64_t>& sizes);

/// A box of the whole tensor, and the index `at` of its first element in a rank's local tensor.
struct LocalBox {
  Box box;
  std::vector<int64_t> at;
  bool operator==(const LocalBox&) const = default;
};

/// Returns the boxes that the rank at `coordinate` holds: one, none if it holds no elements, or
/// several if no later mesh axes multiply to the split factor of a StridedShard, or if the rows of
/// a BlockShard reach from one index of the merged dims to the next.
std::vector<LocalBox> local_boxes(
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    const std::vector<int64_t>& mesh_shape,
    const std::vector<int64_t>& coordinate);

/// A row-major array in memory. Its element at index i - origin is element i of the whole tensor.
struct Block {
  std::vector<int64_t> origin;
  std::vector<int64_t> sizes;
};

/// `length` consecutive elements, which begin at index `from` of one block and at index `to` of
/// another block.
struct CopyRun {
  int64_t from = 0;
  int64_t to = 0;
  int64_t length = 0;
  bool operator==(const CopyRun&) const = default;
};

/// Calls `visit` for the runs that the elements of `box` form in the two blocks. Both blocks must
/// contain the box. The runs are as long as possible, and their indices grow.
void for_each_run(
    const Box& box,
    const Block& from,
    const Block& to,
    const std::function<void(const CopyRun&)>& visit);

} // namespace fsdp::detail
