#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/memory.h>

#include <functional>

namespace fsdp::detail {

/// Called with a tensor and the member of MemoryStats in which it counts.
using MemoryVisitor = std::function<void(int64_t MemoryStats::*, const at::Tensor&)>;

/// While this object lives, memory_stats on the rank that made it calls `visit_all`, which visits
/// tensors that may have memory.
class LiveMemory {
 public:
  explicit LiveMemory(std::function<void(const MemoryVisitor& visit)> visit_all);
  ~LiveMemory();
  LiveMemory(const LiveMemory&) = delete;
  LiveMemory& operator=(const LiveMemory&) = delete;

  const std::function<void(const MemoryVisitor& visit)> visit_all;
};

} // namespace fsdp::detail
