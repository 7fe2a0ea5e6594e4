#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fsdp/memory.h>

#include "process_group/collective_call.h"

namespace fsdp::detail {

/// The activity of a rank's own thread.
enum class Activity : std::uint8_t { Forward, Backward, Optimizer, Sharding, User, Other };

/// Times are nanoseconds since the trace began.
struct TraceSlice {
  Activity activity = Activity::Other;
  std::string name; // of the module, or of the range
  int64_t begin = 0;
  int64_t end = 0;
};

struct TracedCollective {
  CollectiveKind kind = CollectiveKind::Barrier;
  std::string group;
  std::string module;
  int64_t bytes = 0;
  int64_t begin = 0;
  int64_t end = -1; // unknown until somebody waits for it
  int64_t waited = 0;
};

struct TracedWait {
  size_t collective = 0; // index
  int64_t begin = 0;
  int64_t end = 0;
};

struct TracedStep {
  int64_t step = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

struct TracedMemory {
  int64_t at = 0;
  MemoryStats stats;
};

/// The recording of one rank.
struct TraceEvents {
  std::vector<TracedStep> steps;
  std::vector<TraceSlice> slices; // one after another
  std::vector<TracedCollective> collectives;
  std::vector<TracedWait> waits;
  std::vector<TracedMemory> memory;
};

/// Returns the events of a Chrome trace, without the brackets around them. The rank is their
/// process. Adds `offset` (ns) to all times.
std::string chrome_events(const TraceEvents& events, int rank, int64_t offset);

/// Returns a complete Chrome trace.
std::string chrome_trace(const std::vector<std::string>& events_by_rank);

} // namespace fsdp::detail
