#include "runtime/stream.h"

#include <mutex>
#include <unordered_map>
#include <vector>

namespace fsdp::detail {

namespace {

/// Events to be recorded again: to make and to destroy one costs the host more
/// than to record it. A stream that was told to wait for an earlier record
/// waits for that one still.
class EventPool {
 public:
  std::unique_ptr<c10::Event> take(c10::Device device) {
    {
      std::lock_guard lock(mutex_);
      auto& events = free_[device];
      if (!events.empty()) {
        auto event = std::move(events.back());
        events.pop_back();
        return event;
      }
    }
    return std::make_unique<c10::Event>(device.type());
  }
  void give_back(c10::Device device, std::unique_ptr<c10::Event> event) {
    std::lock_guard lock(mutex_);
    free_[device].push_back(std::move(event));
  }

 private:
  std::mutex mutex_; // ranks may be threads
  std::unordered_map<c10::Device, std::vector<std::unique_ptr<c10::Event>>> free_;
};

/// Never destroyed: at exit the driver may be gone first.
EventPool& pool() {
  static auto* events = new EventPool;
  return *events;
}

} // namespace

StreamEvent StreamEvent::of(const OptionalStream& stream) {
  StreamEvent event;
  if (stream) {
    const auto device = stream->device();
    auto taken = pool().take(device);
    taken->record(*stream);
    event.event_ = std::shared_ptr<c10::Event>(taken.release(), [device](c10::Event* unused) {
      pool().give_back(device, std::unique_ptr<c10::Event>(unused));
    });
  }
  return event;
}

} // namespace fsdp::detail
