#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "collective/gather.h"
#include "collective/spare_memory.h"
#include "group/reduction_queue.h"
#include "runtime/comm_streams.h"

namespace fsdp::detail {

class FSDPParamGroup;

/// One forward that a backward may go through. The autograd hook on its outputs owns it, so that
/// it ends with the graph.
struct ForwardRecord {
  std::vector<std::weak_ptr<FSDPParamGroup>> groups; // of one module
  size_t index = 0;                                  // in the order of forwards
  bool is_over = false;                              // a backward has freed its graph
};

// Note [Who keeps communication buffers alive]
//
// Buffers are allocated on one stream and used on another, and the allocator is not told. So
// whoever drops the last reference to a buffer first makes the stream of the allocation wait for
// the last use:
// - A gathered buffer (copy-in stream) is read by the copy-out (compute). In forward the buffer is
//   parked here until the next group has been gathered: so the next copy-in does not wait for
//   this copy-out. In backward it is dropped at once, after the gather streams were made to wait.
// - The input of a gather, if it is a copy (copy-in stream), is read by the gather, for which
//   compute waits. It is treated as the gathered buffer.
// - A placed gather writes the whole parameters themselves (all-gather stream), and compute reads
//   them until reshard. Then the all-gather stream waits for compute, and the memory is freed. A
//   gather behind that wait cannot overlap this compute. In backward this costs nothing: the next
//   group's gather was issued before. In forward the next gather comes right after reshard, so
//   the memory is retired instead: it is kept, with an event of compute, until gathers of half
//   its size have been issued with other memory. So two buffers take turns. The buffer of group i
//   is freed behind the gather of i + 1, and the gather of i + 2 waits for the compute of i only.
//   (Half, because a small group may come between two large ones, as a block's own parameters
//   between two of its layers.) Retired memory is also freed when more is retired, at the end of
//   the outermost forward, after an error, and with this object. Memory that a call by the user
//   gathered, on the compute stream, is freed at once.
// - The input of a reduce-scatter (compute) is kept until the post-backward of a later group makes
//   compute wait for the reduction.
// On the CPU there are no streams. There the same lists let a rank go on while its peers work on
// a collective.

/// Shared by the groups of a tree of modules: streams, buffers in flight, reductions, and the order
/// of forwards.
class CommContext {
 public:
  CommContext() = default;
  ~CommContext();
  CommContext(const CommContext&) = delete;
  CommContext& operator=(const CommContext&) = delete;

  /// Takes the streams. Later calls do nothing.
  void lazy_init(c10::Device device);

  /// Makes all later gathers wait for the event, so that they see what was written before it, by an
  /// optimizer for example.
  void gather_after(const StreamEvent& event);

  /// The streams for a gather: `own` ones in forward and backward, else (in a call by the user)
  /// the current one.
  GatherStreams gather_streams(c10::Device device, bool own) const;

  /// Keeps a gathered buffer whose copy-out has been enqueued, and drops the one before.
  void park(PendingGather gathered, StreamEvent copied_out);
  void release_parked();
  /// Null if nothing is parked.
  const PendingGather* parked() const {
    return parked_ ? &parked_->gathered : nullptr;
  }

  /// Memory of whole parameters that was allocated on `stream` and used until `last_use`.
  struct Retired {
    at::Tensor memory;
    OptionalStream stream;
    StreamEvent last_use;
    int64_t bytes_since = 0; // gathered or retired after this memory
  };
  /// Frees memory that the current stream was the last to use. With `overlap` it is freed behind
  /// the next gathers, so that they do not wait for this use.
  void retire(at::Tensor memory, const OptionalStream& stream, bool overlap);
  /// Call it after issuing a gather of `bytes`. Frees retired memory that was kept long enough.
  void gather_issued(int64_t bytes);
  /// Frees all memory that is kept for later gathers.
  void release_retired();
  const std::deque<Retired>& retired() const {
    return retired_;
  }

  /// For whole parameters and the inputs of reductions, on the CPU.
  SpareMemory spare_memory;

  /// The reductions of all groups, in the order of backward.
  ReductionQueue reductions;

  /// Appends a forward to the order.
  void record_forward(const std::shared_ptr<ForwardRecord>& record);
  /// The last forward before this one whose backward may still come, or null.
  std::shared_ptr<ForwardRecord> forward_before(const ForwardRecord& record) const;
  /// True if a backward may still go through a forward of this group.
  bool expects_backward(const FSDPParamGroup& group) const;
  /// For tests: returns the number of forwards that are recorded.
  size_t num_recorded() const {
    return order_.size();
  }
  /// Call it at the end of the last backward.
  void forget_forwards() {
    order_.clear();
  }

  /// Drops everything in flight. The host does not wait for it: the peers may be gone.
  void reset();

 private:
  struct Parked {
    PendingGather gathered;
    StreamEvent copied_out;
  };

  bool initialized_ = false;
  std::shared_ptr<const CommStreams> streams_ = std::make_shared<const CommStreams>();
  std::optional<Parked> parked_;
  std::deque<Retired> retired_; // oldest first
  std::vector<std::weak_ptr<ForwardRecord>> order_;
};

} // namespace fsdp::detail
