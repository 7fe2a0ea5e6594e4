#pragma once

#include <atomic>
#include <cstdint>

namespace fsdp::detail {

/// Counts the bytes that one rank has allocated and that are not freed yet, and their peak. Any
/// thread may call it.
class MemoryCounter {
 public:
  void add(int64_t bytes);
  void remove(int64_t bytes);
  int64_t current() const {
    return current_.load(std::memory_order_relaxed);
  }
  int64_t peak() const {
    return peak_.load(std::memory_order_relaxed);
  }
  /// Number of allocations.
  int64_t allocations() const {
    return allocations_.load(std::memory_order_relaxed);
  }
  /// Sets the peak to the current bytes.
  void reset_peak();

 private:
  std::atomic<int64_t> current_ = 0;
  std::atomic<int64_t> peak_ = 0;
  std::atomic<int64_t> allocations_ = 0;
};

/// Counts the memory of CPU tensors from the first call on: the requested bytes, for the rank whose
/// thread allocates them. Older memory is never counted. Neither is page-locked memory, which has
/// another allocator.
void count_cpu_memory();

/// The counter of the calling rank. If ranks are threads, each has its own. All other threads use
/// the counter of the process. Counters are never destroyed, so an address identifies a rank.
MemoryCounter& memory_counter();

/// A counter for a rank that is a thread. It lives as long as the process, because blocks may
/// outlive their rank and all static objects.
MemoryCounter& new_memory_counter();

/// From now on, the calling thread's memory is counted here. Null is the counter of the process.
void count_memory_of_thread(MemoryCounter* counter);

} // namespace fsdp::detail
