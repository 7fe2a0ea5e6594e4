#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <fsdp/comm.h>

#include "collective/divide_factors.h"
#include "runtime/stream.h"

namespace fsdp::detail {

/// One unsharded gradient, to be divided along `shard_dim`. All have one dtype.
struct ReduceInput {
  at::Tensor grad;
  int64_t shard_dim = 0;
};

struct ReduceRequest {
  ProcessGroup group;
  at::ScalarType reduce_dtype = at::kFloat;
  DivideFactors factors;
  OptionalStream stream; // of the reduction; the gradients are on the current one
};

/// A reduction under way. `input` must live until the reduction is complete.
struct Reducing {
  at::Tensor input;  // 1D
  at::Tensor output; // 1D
  Work work;
};

/// Lays the gradients out as every rank's shards, rank after rank, padded with
/// zeros to equal lengths and in the reduce dtype, and starts the
/// reduce-scatter. The gradients are let go of as soon as they are copied:
/// `inputs` is empty afterwards. See Note [Flat layout of a group].
Reducing start_reduce(
    ReduceScatter& comm, std::vector<ReduceInput>& inputs, const ReduceRequest& request);

/// Waits, on the current stream, and returns this rank's flat reduced shard:
/// padded shards of the gradients, in order. The input stays, for other streams.
at::Tensor finish_reduce(Reducing& reducing, const ReduceRequest& request);

} // namespace fsdp::detail
