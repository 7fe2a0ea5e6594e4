#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>

namespace fsdp::detail {

/// Counts the calling thread's uses of events, for tests.
struct EventOperations {
  int64_t made = 0;
  int64_t records = 0;
  int64_t waits = 0;
};
inline thread_local EventOperations event_operations;

/// Returns an event for streams of `device`, a used one if the pool has any. To record an event
/// again costs the host less than to make one, and streams that wait for the earlier record are not
/// affected. The event returns to the pool when its last holder drops it.
std::shared_ptr<c10::Event> pooled_event(c10::Device device);

} // namespace fsdp::detail
