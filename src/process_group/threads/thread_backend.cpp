#include "process_group/threads/thread_backend.h"

#include <mutex>
#include <optional>
#include <utility>

#include "runtime/stream.h"

namespace fsdp::detail {

namespace {

class ThreadWork : public c10d::Work {
 public:
  ThreadWork(
      std::shared_ptr<ThreadGroup> group, int rank, std::shared_ptr<PendingOperation> pending)
      : Work(rank), group_(std::move(group)), pending_(std::move(pending)) {}

  // The argument is ignored: the time-out of the ThreadWorld holds.
  bool wait(std::chrono::milliseconds) override {
    std::lock_guard lock(waiting_);
    if (pending_) {
      group_->wait(rank_, *pending_);
      pending_.reset();
    }
    if (device_) {
      enqueued_.block(current_stream(*device_));
    }
    return true;
  }

  /// Waits for the peers on the host. Then the device's work is on the current stream,
  /// and a later `wait` makes the stream that is current then wait for that work.
  void enqueue(c10::Device device) {
    wait(kNoTimeout);
    device_ = device;
    enqueued_ = StreamEvent::of(current_stream(device));
  }

 private:
  const std::shared_ptr<ThreadGroup> group_;
  std::mutex waiting_;
  std::shared_ptr<PendingOperation> pending_;
  std::optional<c10::Device> device_;
  StreamEvent enqueued_;
};

} // namespace

ThreadBackend::ThreadBackend(std::shared_ptr<ThreadGroup> group, int rank)
    : LocalBackend(rank, static_cast<int>(group->world_ranks().size()), "threads"),
      group_(std::move(group)) {}

c10::intrusive_ptr<c10d::Work> ThreadBackend::issue_call(CollectiveCall call) {
  const auto device = call.output.defined() ? call.output.device() : c10::Device(c10::kCPU);
  auto work =
      c10::make_intrusive<ThreadWork>(group_, getRank(), group_->post(getRank(), std::move(call)));
  if (has_streams(device)) {
    work->enqueue(device);
  }
  return work;
}

c10::intrusive_ptr<c10d::Backend> ThreadFactory::make(
    const std::string& name, const std::vector<int>& world_ranks, int rank) {
  return c10::make_intrusive<ThreadBackend>(world_->group(name, world_ranks), rank);
}

} // namespace fsdp::detail
