#include "runtime/event_pool.h"

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp::detail {

namespace {

struct Pool {
  std::mutex mutex;
  std::unordered_map<c10::Device, std::vector<std::unique_ptr<c10::Event>>> unused;
};

/// Never destroyed: events may be dropped after every static object, and the
/// device's driver too.
Pool& pool() {
  static auto* const made = new Pool;
  return *made;
}

std::unique_ptr<c10::Event> take(c10::Device device) {
  std::lock_guard lock(pool().mutex);
  auto& unused = pool().unused[device];
  if (unused.empty()) {
    return nullptr;
  }
  auto event = std::move(unused.back());
  unused.pop_back();
  return event;
}

void give_back(c10::Device device, std::unique_ptr<c10::Event> event) {
  std::lock_guard lock(pool().mutex);
  pool().unused[device].push_back(std::move(event));
}

} // namespace

std::shared_ptr<c10::Event> pooled_event(c10::Device device) {
  auto event = take(device);
  if (!event) {
    event = std::make_unique<c10::Event>(device.type());
    ++event_operations.made;
  }
  return {event.release(), [device](c10::Event* used) {
            give_back(device, std::unique_ptr<c10::Event>(used));
          }};
}

} // namespace fsdp::detail
