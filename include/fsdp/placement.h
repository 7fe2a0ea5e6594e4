#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include <fsdp/export.h>
#include <fsdp/reduce_op.h>

namespace fsdp {

struct ShardPlacement;

/// Every rank of the axis holds the whole tensor.
struct Replicate {
  bool operator==(const Replicate&) const = default;
};

/// The ranks of the axis hold the chunks that `torch::chunk` makes of tensor dim `dim`: the last
/// ranks may hold less than the others, or nothing. A negative dim counts from the end.
struct Shard {
  int64_t dim = 0;
  bool operator==(const Shard&) const = default;
  // NOLINTNEXTLINE(google-explicit-constructor): shard_placement_fn may return a Shard
  operator ShardPlacement() const; // defined in policy.h
};

/// Like Shard, but applied after later mesh axes that shard the same dim and have `split_factor`
/// ranks together. It describes FSDP over a tensor that tensor parallelism, on a later axis, has
/// divided before. If no later axes fit, the tensor is cut into `split_factor` chunks, and each
/// chunk is divided over the axis.
struct StridedShard {
  int64_t dim = 0;
  int64_t split_factor = 1;
  bool operator==(const StridedShard&) const = default;
};

/// Treats the first `dims` dims, two or more, as one dim, and divides that into chunks, one for
/// each rank of the axis. Use it for the stacked weights of a few experts, {experts, rows,
/// columns}: many ranks divide the rows of all experts, and each part is one run of memory. The
/// local tensor has as many dims as the whole one: {1, its rows, columns}. A BlockShard is applied
/// after all other axes, and only one axis can have it.
struct BlockShard {
  int64_t dims = 2;
  bool operator==(const BlockShard&) const = default;
  // NOLINTNEXTLINE(google-explicit-constructor): shard_placement_fn may return a BlockShard
  operator ShardPlacement() const; // defined in policy.h
};

/// Every rank of the axis holds a term. The tensor is the reduction of all terms.
struct Partial {
  ReduceOp op = ReduceOp::Sum;
  bool operator==(const Partial&) const = default;
};

/// The way in which a tensor is distributed over the ranks of one mesh axis.
using Placement = std::variant<Replicate, Shard, StridedShard, Partial, BlockShard>;

/// "R", "S(0)", "_S(0, 2)", "B(2)", "P(sum)"; a list is written as "(R, S(0))".
FSDP_API std::string to_string(const Placement& placement);
FSDP_API std::string to_string(const std::vector<Placement>& placements);

} // namespace fsdp
