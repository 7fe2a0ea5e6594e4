#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/memory.h>

#include <functional>

namespace fsdp::detail {

/// Is told of a tensor, and in which member of MemoryStats it counts.
using MemoryVisitor = std::function<void(int64_t MemoryStats::*, const at::Tensor&)>;

/// While it lives, memory_stats calls `visit_all` on the rank that made it, to learn of tensors
/// that may have memory.
class LiveMemory {
 public:
  explicit LiveMemory(std::function<void(const MemoryVisitor& visit)> visit_all);
  ~LiveMemory();
  LiveMemory(const LiveMemory&) = delete;
  LiveMemory& operator=(const LiveMemory&) = delete;

  const std::function<void(const MemoryVisitor& visit)> visit_all;
};

} // namespace fsdp::detail
