#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include <fsdp/comm.h>

#include "process_group/gather_plan.h"
#include "runtime/stream.h"

namespace fsdp::detail {

// Note [Flat layout of a group]
//
// Each rank keeps the padded shards of a group one after another in one flat buffer. The
// all-gather sends this buffer, or a cast copy of it.
//
// The unsharded parameters are in a second flat buffer. A parameter that is sharded along dim 0 is
// one run there: the shards of rank 0, rank 1 and so on. Padding can only be at the end of a run,
// so the unsharded parameter is a plain view of the beginning of its run. A placed gather writes
// these runs itself, see Note [Placed all-gathers]. Any other gather leaves the ranks' buffers one
// after another, and copy-out makes the runs. A reduction goes the opposite way.

/// The streams of a gather. Copies into its input have a stream of their own, so that they overlap
/// the previous gather.
struct GatherStreams {
  OptionalStream copy_in;
  OptionalStream all_gather;
};

/// An all-gather in progress. `input` and `buffer` must live until all readers of `buffer` have
/// been queued.
struct PendingGather {
  at::Tensor input;  // 1D
  at::Tensor buffer; // 1D: every rank's input, or, if placed, the whole parameters
  Work work;
  StreamEvent issued; // end of the all-gather stream's work: a custom AllGather may queue there
  bool placed = false;
  OptionalStream stream; // if placed: the stream that `buffer` was allocated on

  /// Work that is queued on `current` from now on may read `buffer`.
  void wait(const OptionalStream& current);
};

/// Gathers every rank's `input` into `buffer`. `input` may be this rank's part of `buffer`. If
/// `buffer` is undefined, a new one is allocated.
PendingGather start_gather(
    AllGather& comm,
    at::Tensor input,
    ProcessGroup group,
    const GatherStreams& streams,
    at::Tensor buffer = {});

/// Gathers by `plan`, so that there is nothing to copy out. The group must support placed gathers.
/// Only the all-gather stream writes to the buffer, which is allocated on it if it is undefined.
PendingGather start_placed_gather(
    at::Tensor input,
    const ProcessGroup& group,
    std::shared_ptr<const GatherPlan> plan,
    const GatherStreams& streams = {},
    at::Tensor buffer = {});

/// Copies the gathered buffer into `whole` by `plan`. Only for the CPU. Does not change version
/// counters.
void copy_out(const at::Tensor& buffer, const GatherPlan& plan, const at::Tensor& whole);

/// Copies columns of the gathered buffer, `numels[i]` wide, into `targets[i]` of shape
/// (ranks, numels[i]). Does not change version counters.
void copy_out(
    const at::Tensor& buffer,
    const std::vector<int64_t>& numels,
    int64_t total_numel,
    const std::vector<at::Tensor>& targets);

} // namespace fsdp::detail
