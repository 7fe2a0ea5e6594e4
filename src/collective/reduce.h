#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include <fsdp/process_group.h>

#include "collective/divide_factors.h"

namespace fsdp::detail {

/// One unsharded gradient, to be divided along `shard_dim`.
struct ReduceInput {
  at::Tensor grad;
  int64_t shard_dim = 0;
};

struct ReduceRequest {
  ProcessGroup group;
  at::ScalarType reduce_dtype = at::kFloat;
  at::ScalarType result_dtype = at::kFloat;
  DivideFactors factors;
};

/// A reduction under way. `input` must live until the reduction is complete.
struct Reducing {
  at::Tensor input;
  at::Tensor output;
  Work work;
};

/// Lays the gradients out as every rank's shards, rank after rank, padded with
/// zeros to equal lengths and in the reduce dtype, and starts the
/// reduce-scatter. The gradients are let go of as soon as they are copied:
/// `inputs` is empty afterwards. See Note [Flat layout of a group].
Reducing start_reduce(std::vector<ReduceInput>& inputs, const ReduceRequest& request);

/// Waits, and returns this rank's flat reduced shard in the result dtype:
/// padded shards of the gradients, in order.
at::Tensor finish_reduce(Reducing& reducing, const ReduceRequest& request);

} // namespace fsdp::detail
