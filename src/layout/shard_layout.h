#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <fsdp/placement.h>

namespace fsdp::detail {

// Integer arithmetic for placements: which elements of a tensor a rank holds. No tensors, no
// communication.

/// Elements [offset, offset + length) of one dim.
struct Run {
  int64_t offset = 0;
  int64_t length = 0;
  bool operator==(const Run&) const = default;
};

/// Returns chunk `index` of the `count` chunks into which `torch::chunk` divides `size` elements.
Run chunk_run(int64_t size, int64_t count, int64_t index);

// Note [Order of sharding]
//
// Several mesh axes may shard one tensor dim. The order in which they divide the dim decides which
// rank holds which elements. Plain shards divide in mesh order, the first axis first. A
// StridedShard divides after later axes: after the first ones, in order of division, whose numbers
// of ranks multiply to `split_factor`. Sharding is undone in reverse: the axis that divided last is
// gathered first.

/// How one mesh axis divides a tensor dim.
struct ShardStep {
  int64_t axis = 0;
  int64_t num_ranks = 1;
  int64_t split_factor = 1; // more than 1 only if no later axes multiply to it
  bool operator==(const ShardStep&) const = default;

  /// Returns the runs that rank `index` of the axis takes of `length` elements, in order.
  std::vector<Run> runs(int64_t length, int64_t index) const;
  int64_t length(int64_t length, int64_t index) const;
  /// Returns true if every rank takes one run, and all runs have the same length.
  bool is_even(int64_t length) const {
    return split_factor == 1 && length % num_ranks == 0;
  }
};

/// Returns the steps that divide `dim`, in order; see Note [Order of sharding].
std::vector<ShardStep> shard_steps(
    const std::vector<Placement>& placements, const std::vector<int64_t>& mesh_shape, int64_t dim);

/// Returns the elements that the rank at `coordinate` holds of a dim of `size` elements, as runs of
/// the whole dim, in local order. Empty if the rank holds none.
std::vector<Run> local_runs(
    int64_t size, const std::vector<ShardStep>& steps, const std::vector<int64_t>& coordinate);

/// Returns the number of elements in local_runs.
int64_t local_length(
    int64_t size, const std::vector<ShardStep>& steps, const std::vector<int64_t>& coordinate);

/// The axis of a BlockShard and the dims that it merges.
struct BlockStep {
  int64_t axis = 0;
  int64_t dims = 1;
  int64_t num_ranks = 1;
};

/// Returns the axis that a BlockShard divides, or nothing.
std::optional<BlockStep> block_step(
    const std::vector<Placement>& placements, const std::vector<int64_t>& mesh_shape);

/// Returns {1, ..., rows, ...}: the first `dims` dims as one, the last of them.
std::vector<int64_t> merged_sizes(std::vector<int64_t> sizes, int64_t dims);

/// Returns the sizes of the local tensor at `coordinate`, before a BlockShard divides it.
std::vector<int64_t> sizes_before_blocks(
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    const std::vector<int64_t>& mesh_shape,
    const std::vector<int64_t>& coordinate);

/// Returns the sizes of the local tensor at `coordinate`.
std::vector<int64_t> local_sizes(
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    const std::vector<int64_t>& mesh_shape,
    const std::vector<int64_t>& coordinate);

/// Returns the placements with non-negative dims. Throws ValueError if they do not fit a tensor of
/// `ndim` dims on a mesh of `num_axes` axes.
std::vector<Placement> normalized(
    std::vector<Placement> placements, int64_t ndim, int64_t num_axes);

/// Returns the dim that a Shard or StridedShard divides, and -1 for other placements.
int64_t shard_dim(const Placement& placement);
/// True if the ranks of the axis hold different elements.
bool divides(const Placement& placement);

} // namespace fsdp::detail
