#pragma once

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>
#include <utility>

#include "runtime/event_pool.h"

namespace fsdp::detail {

/// Returns true if work on `device` is queued on streams. On the CPU and on meta, work is done when
/// the call returns, so there is nothing to order.
inline bool has_streams(c10::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

/// The type of this machine's accelerator. Empty if there is none, even if torch was built for one.
inline std::optional<c10::DeviceType> accelerator_type() {
  const auto type = at::getAccelerator();
  return type && c10::impl::VirtualGuardImpl(*type).deviceCount() > 0 ? type : std::nullopt;
}

/// The calling thread's current device of a type.
inline c10::Device current_device(c10::DeviceType type) {
  return type == c10::kCPU ? c10::Device(type) : c10::impl::VirtualGuardImpl(type).getDevice();
}

/// The calling thread's current stream on `device`.
inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// A stream, or nothing on a device without streams. Functions that take an empty one do nothing,
/// so that callers need no second code path.
using OptionalStream = std::optional<c10::Stream>;

inline OptionalStream optional_current_stream(c10::Device device) {
  return has_streams(device) ? OptionalStream(current_stream(device)) : std::nullopt;
}

/// A point in a stream's work. A default-constructed event counts as reached.
class StreamEvent {
 public:
  StreamEvent() = default;
  explicit StreamEvent(c10::Event event) : event_(std::make_shared<c10::Event>(std::move(event))) {}

  /// Records the end of the work that is queued on `stream` so far.
  static StreamEvent of(const OptionalStream& stream) {
    StreamEvent event;
    if (stream) {
      event.event_ = pooled_event(stream->device());
      event.event_->record(*stream);
      ++event_operations.records;
    }
    return event;
  }

  /// Work that is queued on `stream` from now on waits for this event.
  void block(const OptionalStream& stream) const {
    if (event_ && stream) {
      event_->block(*stream);
      ++event_operations.waits;
    }
  }
  /// Blocks the calling thread until the event is reached.
  void synchronize() const {
    if (event_) {
      event_->synchronize();
    }
  }

 private:
  std::shared_ptr<c10::Event> event_;
};

/// Work that is queued on `later` from now on waits for the work queued on `earlier` so far.
inline void wait_for_stream(const OptionalStream& later, const OptionalStream& earlier) {
  if (later && earlier && *later != *earlier) {
    StreamEvent::of(earlier).block(later);
  }
}

} // namespace fsdp::detail
