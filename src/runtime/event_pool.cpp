#include "runtime/event_pool.h"

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp::detail {

namespace {

struct EventPool {
  std::mutex mutex;
  std::unordered_map<c10::Device, std::vector<std::unique_ptr<c10::Event>>> unused;
};

/// Never destroyed, because events may be dropped after all static objects and the device's driver
/// are gone.
EventPool& event_pool() {
  static auto* const made = new EventPool;
  return *made;
}

std::unique_ptr<c10::Event> take_event(c10::Device device) {
  std::lock_guard lock(event_pool().mutex);
  auto& unused = event_pool().unused[device];
  if (unused.empty()) {
    return nullptr;
  }
  auto event = std::move(unused.back());
  unused.pop_back();
  return event;
}

void give_back_event(c10::Device device, std::unique_ptr<c10::Event> event) {
  std::lock_guard lock(event_pool().mutex);
  event_pool().unused[device].push_back(std::move(event));
}

} // namespace

std::shared_ptr<c10::Event> pooled_event(c10::Device device) {
  auto event = take_event(device);
  if (!event) {
    event = std::make_unique<c10::Event>(device.type());
    ++event_operations.made;
  }
  return {event.release(), [device](c10::Event* used) {
            give_back_event(device, std::unique_ptr<c10::Event>(used));
          }};
}

} // namespace fsdp::detail
