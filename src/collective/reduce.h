#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <fsdp/comm.h>

#include "collective/divide_factors.h"
#include "collective/spare_memory.h"
#include "runtime/stream.h"

namespace fsdp::detail {

/// One unsharded gradient, to be sharded along `shard_dim`. All gradients of a reduction have the
/// same dtype.
struct ReduceInput {
  at::Tensor grad;
  int64_t shard_dim = 0;
};

struct ReduceRequest {
  ProcessGroup group;
  at::ScalarType reduce_dtype = at::kFloat;
  DivideFactors factors;
  OptionalStream stream;               // of the reduction; the gradients are on the current stream
  SpareMemory* input_memory = nullptr; // for the input; if null, `comm` allocates it
};

/// A reduction in progress. `input` must live until the reduction is complete.
struct PendingReduce {
  at::Tensor input;  // 1D
  at::Tensor output; // 1D
  Work work;
};

/// Copies the gradients into one buffer in the reduce dtype: every rank's shards, rank after rank,
/// padded with zeros to equal lengths. Then starts the reduce-scatter. Clears `inputs`, so that the
/// gradients are freed as soon as they are copied. See Note [Flat layout of a group].
PendingReduce start_reduce(
    ReduceScatter& comm, std::vector<ReduceInput>& inputs, const ReduceRequest& request);

/// Makes the current stream wait and returns this rank's flat reduced shard: the padded shards of
/// the gradients, in order. `reducing.input` stays alive for streams that still read it.
at::Tensor finish_reduce(PendingReduce& reducing, const ReduceRequest& request);

} // namespace fsdp::detail
