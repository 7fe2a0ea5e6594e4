#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace fsdp::detail {

/// Whether work on `device` is queued on streams; on the CPU (and on meta) it
/// is done when the call returns, and there is nothing to order.
inline bool has_streams(c10::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

/// The calling thread's current stream on `device`.
inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

} // namespace fsdp::detail
