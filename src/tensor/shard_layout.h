#pragma once

#include <cstdint>
#include <vector>

#include <fsdp/placement.h>

namespace fsdp::detail {

// Integer arithmetic of placements: which elements of a tensor a rank holds.
// No tensors, no communication.

/// Elements [offset, offset + length) of one dim.
struct Run {
  int64_t offset = 0;
  int64_t length = 0;
  bool operator==(const Run&) const = default;
};

/// Chunk `index` of `size` elements divided by `torch::chunk` into `count`.
Run chunk_run(int64_t size, int64_t count, int64_t index);

// Note [Order of sharding]
//
// Several mesh axes may shard one tensor dim, and the order in which they
// divide it decides who holds what. Plain shards divide in mesh order, the
// first axis first. A StridedShard divides after later axes, as many of the
// first ones in order as have `split_factor` ranks together. Undoing goes the
// other way round: the axis that divided last is gathered first.

/// One mesh axis's division of a tensor dim.
struct ShardStep {
  int64_t axis = 0;
  int64_t num_ranks = 1;
  int64_t split_factor = 1; // more than 1 only where no later axes account for it
  bool operator==(const ShardStep&) const = default;

  /// What rank `index` of the axis takes of `length` elements, in order.
  std::vector<Run> runs(int64_t length, int64_t index) const;
  int64_t length(int64_t length, int64_t index) const;
  /// Whether every rank takes one run, of the same length.
  bool is_even(int64_t length) const {
    return split_factor == 1 && length % num_ranks == 0;
  }
};

/// The steps that divide dim `dim`, in order; see Note [Order of sharding].
std::vector<ShardStep> shard_steps(
    const std::vector<Placement>& placements, const std::vector<int64_t>& mesh_shape, int64_t dim);

/// Elements of dim `dim` (of size `size`) that the rank at `coordinate` holds,
/// as runs of the whole, in local order. An empty part gives no run.
std::vector<Run> local_runs(
    int64_t size, const std::vector<ShardStep>& steps, const std::vector<int64_t>& coordinate);

/// Number of them.
int64_t local_length(
    int64_t size, const std::vector<ShardStep>& steps, const std::vector<int64_t>& coordinate);

/// Sizes of the local tensor at `coordinate`.
std::vector<int64_t> local_sizes(
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    const std::vector<int64_t>& mesh_shape,
    const std::vector<int64_t>& coordinate);

/// Makes dims non-negative; throws ValueError for placements that do not fit a
/// tensor of `ndim` dims on a mesh of `num_axes` axes.
std::vector<Placement> normalized(
    std::vector<Placement> placements, int64_t ndim, int64_t num_axes);

/// The dim that a Shard or StridedShard divides, else -1.
int64_t shard_dim(const Placement& placement);

} // namespace fsdp::detail
