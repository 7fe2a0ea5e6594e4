#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "collective/reduce.h"
#include "runtime/comm_streams.h"

namespace fsdp::detail {

class FSDPParam;
class GradReducer;

/// The reduction of one group's gradients of one dtype, from its start to its end.
struct Reduction {
  std::weak_ptr<GradReducer> reducer; // null if the parameters are gone, too
  PendingReduce reducing;
  ReduceRequest request;
  std::vector<FSDPParam*> params;
  bool all_reduce = true;          // over the replicas, in this backward
  bool is_last = false;            // of these parameters before an optimizer may step
  bool grads_are_enqueued = false; // behind the reduce-scatter, on its stream
};

// Note [Two reductions]
//
// Gradients are reduce-scattered over the ranks that hold the other shards. With replicas (HSDP)
// the result is then all-reduced over the replicas, in place, on a stream of its own. Without
// shards (replicate) there is only the all-reduce. Groups come in the order of backward:
//
//   post-backward of group n      start its reduce-scatter
//   post-backward of group n - 1  finish the reduce-scatter of n, start the all-reduce of n
//   post-backward of group n - 3  finish the all-reduce of n: at most two are under way
//   end of backward               finish the rest
//
// Offloaded gradients leave the device behind their reduce-scatter, on its stream, and nobody
// waits for them. Then only the input of the reduce-scatter waits for the next group.
//
// A backward with `all_reduce_grads` off keeps the reduce-scattered gradients as partial sums. The
// next reduce-scatter of the group adds to them.

/// The reductions that were started and not finished, oldest first. It alone decides in which
/// order they are finished.
class ReductionQueue {
 public:
  void set_streams(std::shared_ptr<const CommStreams> streams) {
    streams_ = std::move(streams);
  }
  const OptionalStream& reduce_scatter_stream() const {
    return streams_->reduce_scatter;
  }

  void add(Reduction reduction);
  /// Finishes reduce-scatters until the next one may start.
  void make_room() {
    finish_reduce_scatters(max_input_buffers - 1);
  }
  void finish_all();
  /// Drops all reductions. The host does not wait for them: the peers may be gone.
  void clear();
  const std::deque<Reduction>& reduce_scatters() const {
    return reduce_scatters_;
  }
  const std::deque<Reduction>& all_reduces() const {
    return all_reduces_;
  }

  /// How many inputs of reduce-scatters may be in memory at a time.
  size_t max_input_buffers = 1;

 private:
  void finish_reduce_scatters(size_t max_left);
  void finish_all_reduces(size_t max_left);

  std::shared_ptr<const CommStreams> streams_ = std::make_shared<const CommStreams>();
  std::deque<Reduction> reduce_scatters_;
  std::deque<Reduction> all_reduces_;
};

} // namespace fsdp::detail
