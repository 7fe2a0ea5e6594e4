#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include <fsdp/export.h>

namespace fsdp {

/// Bytes on one device that belong to the calling rank.
struct MemoryStats {
  int64_t shards = 0;        // this rank's shards of the parameters
  int64_t gathered = 0;      // parameters that are gathered at the moment
  int64_t gradients = 0;     // of shards and of gathered parameters
  int64_t communication = 0; // buffers of gathers and reductions, or kept for the next
  int64_t other = 0;         // everything else: activations, optimizer state, your own tensors
  int64_t allocated = 0;     // the sum of the above, if all of it was counted
  int64_t peak = 0;          // the highest `allocated` since reset_peak_memory_stats
};

/// Returns what is allocated now. Must be called by the thread that trains. On the CPU, counting
/// begins with the first call: tensors that are older, and page-locked tensors, count in their
/// category but not in `allocated`. On an accelerator, `allocated` and `peak` are those of the
/// caching allocator, for all ranks of this process that share the device.
FSDP_API MemoryStats memory_stats(c10::Device device);

/// Sets the peak to what is allocated now.
FSDP_API void reset_peak_memory_stats(c10::Device device);

} // namespace fsdp
