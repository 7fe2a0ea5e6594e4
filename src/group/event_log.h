#pragma once

#include <fsdp/debug.h>

namespace fsdp::detail {

/// Tells all the EventLogs of the calling thread.
void record_event(EventKind kind, const std::string& module, TrainingState state);

} // namespace fsdp::detail
