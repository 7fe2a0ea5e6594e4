#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>

namespace fsdp::detail {

/// What the calling thread did with events: for tests.
struct EventOperations {
  int64_t made = 0;
  int64_t records = 0;
  int64_t waits = 0;
};
inline thread_local EventOperations event_operations;

/// An event for streams of `device`, used before where there is one: to make one
/// costs the host more than to record it again, and whoever waits for the old
/// record still does. Goes back when the last holder drops it.
std::shared_ptr<c10::Event> pooled_event(c10::Device device);

} // namespace fsdp::detail
