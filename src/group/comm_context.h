#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "collective/gather.h"
#include "runtime/comm_streams.h"

namespace fsdp::detail {

class FSDPParamGroup;

/// One forward that a backward may go through. Owned by the autograd hook on
/// its outputs, so that it ends with the graph.
struct ForwardRecord {
  std::vector<std::weak_ptr<FSDPParamGroup>> groups; // of one module
  size_t index = 0;                                  // in the post-forward order
  bool is_over = false;                              // a backward freed its graph
};

// Note [Who keeps communication buffers alive]
//
// Buffers are allocated on one stream and used on another, without telling the
// allocator. So whoever drops the last reference must first make the stream of
// the allocation wait for the last use:
// - a gathered buffer (copy-in stream) is read by copy-out (compute). In forward
//   it is parked here until the next group has been gathered, so that the next
//   copy-in does not wait for this copy-out; in backward it is dropped at once,
//   after the gather streams were made to wait.
// - the input of a gather, where it is a copy (copy-in stream), is read by the
//   gather, for which compute waits: as the gathered buffer.
// - what a placed gather has written (all-gather stream) is the whole parameters
//   themselves, which compute reads until reshard. The rule is the same: the
//   all-gather stream waits for the compute that was there at reshard, then the
//   memory goes. But a gather that comes behind that wait does not overlap this
//   compute. In backward it need not, since the next group's was issued before.
//   In forward the next group's comes right after reshard, so there the memory is
//   retired: kept, with an event of compute, until gathers of half its size have
//   been issued with other memory. So two buffers take turns: that of group i is
//   freed behind the gather of i + 1, and what i + 2 gathers into it waits for the
//   compute of i only. (Half, because a small group may come between two large
//   ones, as a block's own parameters between two of its layers.) What does not
//   gather frees as well: more that is retired, the end of the outermost forward,
//   an error, the end of this object. Memory that a call by the user gathered, on
//   the compute stream, is freed at once.
// - a reduce-scatter input (compute) is kept until a later group's post-backward
//   makes compute wait for the reduction.
// On the CPU there are no streams. There the same lists let a rank go on while
// its peers work on a collective.

/// What the groups of a tree of modules share: streams, buffers in flight, and
/// the order of forwards.
class CommContext {
 public:
  CommContext() = default;
  ~CommContext();
  CommContext(const CommContext&) = delete;
  CommContext& operator=(const CommContext&) = delete;

  /// Takes the streams, once.
  void lazy_init(c10::Device device);

  /// What was written before now (by an optimizer, on the current stream) is
  /// seen by the gathers to come; or what was before `event`.
  void gather_after(const StreamEvent& event);

  /// The streams for a gather: of their own in forward and backward, else (a
  /// call by the user) the current one.
  GatherStreams gather_streams(c10::Device device, bool own) const;

  /// Keeps a gathered buffer whose copy-out has been enqueued; lets go of the
  /// one before.
  void park(Gathered gathered, StreamEvent copied_out);
  void release_parked();
  /// Null where there is none.
  const Gathered* parked() const {
    return parked_ ? &parked_->gathered : nullptr;
  }

  /// Memory of whole parameters, allocated on `stream`, that the current stream was
  /// the last to use.
  struct Retired {
    at::Tensor memory;
    OptionalStream stream;
    StreamEvent last_use;
    int64_t bytes_since = 0; // gathered or retired
  };
  /// Frees it, behind the next gathers if they are to overlap this use.
  void retire(at::Tensor memory, const OptionalStream& stream, bool overlap);
  /// A gather of so many bytes has been issued: what it was to overlap is free.
  void gather_issued(int64_t bytes);
  void release_retired();
  const std::deque<Retired>& retired() const {
    return retired_;
  }

  const OptionalStream& reduce_scatter_stream() const {
    return streams_->reduce_scatter;
  }
  const OptionalStream& all_reduce_stream() const {
    return streams_->all_reduce;
  }
  /// Reductions over the shards' ranks, and then over replicas, that were
  /// started and not finished, oldest first. A group is there once for each.
  void add_reduce_scatter(std::weak_ptr<FSDPParamGroup> group);
  void add_all_reduce(std::weak_ptr<FSDPParamGroup> group);
  /// Finishes the oldest until at most so many are left.
  void finish_reduce_scatters(size_t max_left);
  void finish_all_reduces(size_t max_left);
  size_t max_input_buffers = 1;

  /// Appends to the order of forwards.
  void record_forward(const std::shared_ptr<ForwardRecord>& record);
  /// The last forward before this one whose backward may still come, or null.
  std::shared_ptr<ForwardRecord> forward_before(const ForwardRecord& record) const;
  size_t num_recorded() const {
    return order_.size();
  }
  /// At the end of the last backward.
  void forget_forwards() {
    order_.clear();
  }

  /// Everything in flight is dropped; the host does not wait for it, since the
  /// peers may be gone.
  void reset();

 private:
  struct Parked {
    Gathered gathered;
    StreamEvent copied_out;
  };

  bool initialized_ = false;
  std::shared_ptr<const CommStreams> streams_ = std::make_shared<const CommStreams>();
  std::optional<Parked> parked_;
  std::deque<Retired> retired_; // oldest first
  std::deque<std::weak_ptr<FSDPParamGroup>> reduce_scatters_;
  std::deque<std::weak_ptr<FSDPParamGroup>> all_reduces_;
  std::vector<std::weak_ptr<ForwardRecord>> order_;
};

} // namespace fsdp::detail
