#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include <fsdp/export.h>
#include <fsdp/reduce_op.h>

namespace fsdp {

struct ShardPlacement;

/// Every rank of the axis holds the whole.
struct Replicate {
  bool operator==(const Replicate&) const = default;
};

/// The axis divides tensor dim `dim` exactly as `torch::chunk` does: the last
/// ranks may hold less, or nothing. A negative dim counts from the end.
struct Shard {
  int64_t dim = 0;
  bool operator==(const Shard&) const = default;
  operator ShardPlacement() const; // NOLINT, in policy.h
};

/// Like Shard, but applied after the later mesh axes that shard the same dim
/// and together have `split_factor` ranks: FSDP over a tensor that tensor
/// parallelism, on a later axis, has divided already. Where no later axes fit,
/// each of `split_factor` chunks of the tensor is divided over the axis.
struct StridedShard {
  int64_t dim = 0;
  int64_t split_factor = 1;
  bool operator==(const StridedShard&) const = default;
};

/// Every rank of the axis holds a term; the value is their reduction.
struct Partial {
  ReduceOp op = ReduceOp::Sum;
  bool operator==(const Partial&) const = default;
};

/// How one mesh axis holds a tensor.
using Placement = std::variant<Replicate, Shard, StridedShard, Partial>;

/// "R", "S(0)", "_S(0, 2)", "P(sum)"; of a list: "(R, S(0))".
FSDP_API std::string to_string(const Placement& placement);
FSDP_API std::string to_string(const std::vector<Placement>& placements);

} // namespace fsdp
