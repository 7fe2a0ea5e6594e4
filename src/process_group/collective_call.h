#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/reduce_op.h>

namespace fsdp::detail {

struct GatherPlan;

enum class CollectiveKind : std::uint8_t {
  AllGather,
  ReduceScatter,
  AllReduce,
  Broadcast,
  Scatter,
  AllToAll,
  Barrier,
};

const char* to_string(CollectiveKind kind);

/// What one rank brings to one collective. In-place collectives (all-reduce,
/// broadcast) use `output` alone; a barrier has no tensor.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::Barrier;
  at::Tensor output;
  at::Tensor input; // scatter: defined on the root only
  ReduceOp op = ReduceOp::Sum;
  int root = 0;
  std::vector<int64_t> out_splits; // all-to-all: lengths along dim 0, or empty
  std::vector<int64_t> in_splits;
  // All-gather: where the parts of every input go; null for whole inputs in a row.
  std::shared_ptr<const GatherPlan> plan = nullptr;

  /// "all_gather(out float[8], in float[2])"
  std::string str() const;
  /// Of the larger side, without gaps.
  int64_t bytes() const;
};

/// Throws ValueError unless `call` is well-formed for `rank` of a group of
/// `size`: matching element counts, one dtype and device, contiguous, a valid
/// root. Input and output may share memory only where the input is this rank's
/// part of an all-gather's output, or the output that of a reduce-scatter's
/// input.
void check_call(const CollectiveCall& call, int rank, int size);

} // namespace fsdp::detail
