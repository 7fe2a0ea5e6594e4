#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
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

/// The purpose of a collective of the engine. Ranks must agree on it.
struct CollectivePurpose {
  std::string text; // "of module 'layers.0'", for messages
  uint64_t hash; // of the model, of the module's name, and of the parameters' names, sizes and dims
};

/// One rank's call of a collective: the tensors and options. In-place collectives
/// (all-reduce, broadcast) use `output` alone. A barrier has no tensor.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::Barrier;
  at::Tensor output;
  at::Tensor input; // scatter: defined on the root only
  ReduceOp op = ReduceOp::Sum;
  std::optional<ReduceOp> asked_op = {}; // what the caller asked for, if the backend computes `op`
  int root = 0;
  std::vector<int64_t> out_splits; // all-to-all: lengths along dim 0, or empty
  std::vector<int64_t> in_splits;
  // All-gather: where the parts of each rank's input go in the output. If it is null, the inputs
  // follow one another in rank order.
  std::shared_ptr<const GatherPlan> plan = nullptr;
  std::shared_ptr<const CollectivePurpose> purpose = nullptr; // null: not the engine's

  /// Returns 0 without a purpose.
  uint64_t purpose_hash() const {
    return purpose ? purpose->hash : 0;
  }
  /// "all_gather of module 'net' (out float[8], in float[2])"
  std::string str() const;
  /// Returns the bytes of the larger one of input and output. Gaps in a planned output do not
  /// count.
  int64_t bytes() const;
};

/// Throws ValueError unless `call` is well-formed for `rank` of a group of
/// `size`: matching element counts, one dtype and device, contiguous, a valid
/// root. Input and output may share memory in two cases only: the input of an
/// all-gather may be this rank's part of the output, and the output of a
/// reduce-scatter may be this rank's part of the input.
void check_call(const CollectiveCall& call, int rank, int size);

} // namespace fsdp::detail
