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
// Every rank's padded shards lie one behind the other in one flat buffer: the
// all-gather input, as it is or by one copy that casts. The whole parameters are
// in another one, each a run of all ranks' pieces, where padding can only come
// last: an unsharded parameter is a plain view of the beginning of its run. A
// gather that knows the plan makes these runs itself, see Note [Placed
// all-gathers]; else it leaves the ranks' buffers one behind the other, and
// copy-out makes them. Reduction goes the other way.

/// Where a gather is queued. Copies into its input go first, on a stream of
/// their own, so that they overlap the gather before.
struct GatherStreams {
  OptionalStream copy_in;
  OptionalStream all_gather;
};

/// An all-gather under way. Input and buffer must live until what reads the
/// buffer has been enqueued.
struct Gathered {
  at::Tensor input;  // 1D
  at::Tensor buffer; // 1D: ranks x input; or placed: the whole parameters
  Work work;
  StreamEvent issued; // for a transport that works on the stream itself
  bool placed = false;
  OptionalStream stream; // placed: that the buffer was allocated on

  /// What the current stream is given from now on may read the buffer.
  void wait(const OptionalStream& current);
};

/// Gathers every rank's `input` into `buffer`, of which it may be this rank's part;
/// undefined, a new one is made.
Gathered start_gather(
    AllGather& comm,
    at::Tensor input,
    ProcessGroup group,
    const GatherStreams& streams,
    at::Tensor buffer = {});

/// The same by a plan, for a group that can: there is nothing to copy out. The
/// buffer is allocated on the all-gather stream, which alone writes to it.
Gathered start_placed_gather(
    at::Tensor input,
    const ProcessGroup& group,
    std::shared_ptr<const GatherPlan> plan,
    const GatherStreams& streams = {});

/// Copies the gathered buffer into `whole` by a plan, on the CPU. Moves no
/// version counter.
void copy_out(const at::Tensor& buffer, const GatherPlan& plan, const at::Tensor& whole);

/// Copies columns of the gathered buffer, `numels[i]` wide, into `targets[i]`
/// of shape (ranks, numels[i]). Moves no version counter.
void copy_out(
    const at::Tensor& buffer,
    const std::vector<int64_t>& numels,
    int64_t total_numel,
    const std::vector<at::Tensor>& targets);

} // namespace fsdp::detail
