#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <fsdp/placement.h>

namespace fsdp::detail {

// Integer arithmetic of parts of tensors: no tensors, no files.

/// A rectangular part of a tensor.
struct Box {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  bool operator==(const Box&) const = default;

  int64_t numel() const;
  /// All of a tensor of `sizes`.
  static Box whole(const std::vector<int64_t>& sizes);
};

/// What two boxes have in common, if anything. A scalar is one element.
std::optional<Box> intersection(const Box& first, const Box& second);

/// Whether the boxes lie in a tensor of `sizes`, and each of its elements in
/// exactly one of them.
bool tile(const std::vector<Box>& boxes, const std::vector<int64_t>& sizes);

/// A box of the whole tensor, and where it lies in a rank's local part.
struct LocalBox {
  Box box;
  std::vector<int64_t> at;
  bool operator==(const LocalBox&) const = default;
};

/// What the rank at `coordinate` holds: one box, none, or, for a StridedShard
/// that no later axes account for, several.
std::vector<LocalBox> local_boxes(
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    const std::vector<int64_t>& mesh_shape,
    const std::vector<int64_t>& coordinate);

/// Elements in memory, in row-major order: their sizes, and which element of
/// the whole tensor the first would be.
struct Block {
  std::vector<int64_t> origin;
  std::vector<int64_t> sizes;
};

/// `length` elements, at an index of one block and at one of another.
struct CopyRun {
  int64_t from = 0;
  int64_t to = 0;
  int64_t length = 0;
  bool operator==(const CopyRun&) const = default;
};

/// Calls `visit` for the elements of `box`, which both blocks contain, in as
/// few runs as can be, with growing indices.
void for_each_run(
    const Box& box,
    const Block& from,
    const Block& to,
    const std::function<void(const CopyRun&)>& visit);

} // namespace fsdp::detail
