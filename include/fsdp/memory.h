#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include <fsdp/export.h>

namespace fsdp {

/// Bytes on one device, of the calling rank.
struct MemoryStats {
  int64_t shards = 0;        // sharded parameters
  int64_t gathered = 0;      // whole parameters, while they are gathered
  int64_t gradients = 0;     // of both
  int64_t communication = 0; // buffers of gathers and reductions under way
  int64_t other = 0;         // all else: activations, optimizer state, the user's tensors
  int64_t allocated = 0;     // the sum of these, where all of it was counted
  int64_t peak = 0;          // the highest `allocated` since reset_peak_memory_stats
};

/// What is allocated now. To be called by the thread that trains. On the CPU
/// the first call begins to count: tensors that are older, or page-locked,
/// count in their category, but not as `allocated`. On an accelerator
/// `allocated` and `peak` are its caching allocator's, for all ranks of this
/// process that share the device.
FSDP_API MemoryStats memory_stats(c10::Device device);

/// The peak begins anew with what is allocated now.
FSDP_API void reset_peak_memory_stats(c10::Device device);

} // namespace fsdp
