#pragma once

#include <atomic>
#include <cstdint>

namespace fsdp::detail {

/// The bytes that one rank has allocated and nobody has freed, and the most
/// there were. Any thread may add and take away.
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
  /// How often something was allocated.
  int64_t allocations() const {
    return allocations_.load(std::memory_order_relaxed);
  }
  /// The peak is what is there now.
  void reset_peak();

 private:
  std::atomic<int64_t> current_ = 0;
  std::atomic<int64_t> peak_ = 0;
  std::atomic<int64_t> allocations_ = 0;
};

/// From the first call on, the memory of CPU tensors is counted by the bytes
/// that were asked for, for the rank whose thread allocates it. Older memory is
/// never counted; nor is page-locked memory, which has another allocator.
void count_cpu_memory();

/// The calling rank's: its thread's where ranks are threads, else that of the
/// process, which threads that are no ranks use too. Never destroyed, so its
/// address tells ranks apart.
MemoryCounter& memory_counter();

/// From here on the calling thread is a rank with a counter of its own, a new
/// one; or it is not.
void count_memory_of_thread(bool apart);

} // namespace fsdp::detail
