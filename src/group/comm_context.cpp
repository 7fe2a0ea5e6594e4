#include "group/comm_context.h"

#include <algorithm>
#include <utility>

namespace fsdp::detail {

CommContext::~CommContext() {
  try {
    release_retired();
  } catch (const std::exception&) { // the device is lost, or the process ends
  }
}

void CommContext::lazy_init(c10::Device device) {
  if (std::exchange(initialized_, true)) {
    return;
  }
  streams_ = comm_streams(device);
  reductions.set_streams(streams_);
}

// ------------------------------------------------------------ Gathers

void CommContext::gather_after(const StreamEvent& event) {
  event.block(streams_->copy_in); // every gather waits for this stream
}

GatherStreams CommContext::gather_streams(c10::Device device, bool own) const {
  if (own && initialized_) {
    return {streams_->copy_in, streams_->all_gather};
  }
  const auto current = optional_current_stream(device);
  return {current, current};
}

void CommContext::park(PendingGather gathered, StreamEvent copied_out) {
  parked_ = Parked{std::move(gathered), std::move(copied_out)};
}

void CommContext::release_parked() {
  if (parked_) {
    gather_after(parked_->copied_out);
    parked_.reset();
  }
}

void CommContext::retire(at::Tensor memory, const OptionalStream& stream, bool overlap) {
  auto last_use = StreamEvent::of(optional_current_stream(memory.device()));
  if (overlap) {
    gather_issued(static_cast<int64_t>(memory.nbytes())); // frees what was retired before
  }
  retired_.push_back({std::move(memory), stream, std::move(last_use)});
  if (!overlap) {
    release_retired();
  }
}

void CommContext::gather_issued(int64_t bytes) {
  for (auto& each : retired_) {
    each.bytes_since += bytes;
  }
  // The oldest goes first: a stream that waited for a later event has waited for the earlier ones.
  while (!retired_.empty() && 2 * retired_.front().bytes_since >=
                                  static_cast<int64_t>(retired_.front().memory.nbytes())) {
    retired_.front().last_use.block(retired_.front().stream);
    retired_.pop_front();
  }
}

void CommContext::release_retired() {
  for (const auto& each : retired_) {
    each.last_use.block(each.stream);
  }
  retired_.clear();
  spare_memory.free();
}

// ------------------------------------------------------------ Order

void CommContext::record_forward(const std::shared_ptr<ForwardRecord>& record) {
  while (!order_.empty() && order_.back().expired()) {
    order_.pop_back(); // a forward without a backward leaves nothing behind
  }
  record->index = order_.size();
  order_.push_back(record);
}

std::shared_ptr<ForwardRecord> CommContext::forward_before(const ForwardRecord& record) const {
  if (record.index >= order_.size() || order_[record.index].lock().get() != &record) {
    return nullptr; // this record is of an iteration that has ended
  }
  for (size_t i = record.index; i > 0; --i) {
    if (auto before = order_[i - 1].lock()) {
      // If microbatches run backward in the order of their forwards, the one before has already had
      // its backward.
      return before->is_over ? nullptr : before;
    }
  }
  return nullptr;
}

bool CommContext::expects_backward(const FSDPParamGroup& group) const {
  return std::any_of(order_.begin(), order_.end(), [&](const auto& weak) {
    const auto record = weak.lock();
    return record && !record->is_over &&
           std::any_of(record->groups.begin(), record->groups.end(), [&](const auto& used) {
             return used.lock().get() == &group;
           });
  });
}

void CommContext::reset() {
  release_parked();
  release_retired();
  // Work in flight still uses the memory that is freed here.
  wait_for_stream(streams_->copy_in, streams_->all_gather);
  wait_for_stream(streams_->reduce_scatter, streams_->all_reduce);
  if (const auto& scatter = streams_->reduce_scatter) {
    wait_for_stream(current_stream(scatter->device()), scatter);
  }
  reductions.clear();
  order_.clear();
}

} // namespace fsdp::detail
