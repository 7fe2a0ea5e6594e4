#include "runtime/counting_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstddef>
#include <new>

namespace fsdp::detail {

namespace {

constinit MemoryCounter process_counter;
thread_local MemoryCounter* thread_counter = nullptr;

/// Stored in front of each block. Names the counter of the rank that allocated the block, because
/// another rank may free it.
struct Header {
  MemoryCounter* counter;
  size_t nbytes;
  void* context; // of the inner allocator's block
  c10::DeleterFnPtr free;
};
// A multiple of the inner allocator's alignment, so that the data is aligned as well.
constexpr size_t kHeaderBytes = 64;
static_assert(sizeof(Header) <= kHeaderBytes);

void free_block(void* data) {
  if (data == nullptr) {
    return;
  }
  const auto header = *reinterpret_cast<Header*>(static_cast<std::byte*>(data) - kHeaderBytes);
  header.counter->remove(static_cast<int64_t>(header.nbytes));
  header.free(header.context);
}

class CountingAllocator : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  /// Takes memory from this allocator from now on.
  void set_inner(c10::Allocator* inner) {
    inner_ = inner;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    std::byte* data = nullptr;
    if (nbytes > 0) {
      auto block = inner_.load()->allocate(kHeaderBytes + nbytes);
      data = static_cast<std::byte*>(block.get()) + kHeaderBytes;
      auto* header = new (block.get())
          Header{&memory_counter(), nbytes, block.get_context(), block.get_deleter()};
      block.release_context(); // the header owns the context now
      header->counter->add(static_cast<int64_t>(nbytes));
    }
    return {data, data, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* dest, const void* src, size_t count) const override {
    inner_.load()->copy_data(dest, src, count);
  }

 private:
  std::atomic<c10::Allocator*> inner_;
};

/// Made when the library is loaded: torch gives it to other threads without synchronising with
/// them. Never freed, because blocks may outlive all static objects.
CountingAllocator& counting_allocator = *new CountingAllocator(c10::GetCPUAllocator());

} // namespace

// ------------------------------------------------------------ MemoryCounter

void MemoryCounter::add(int64_t bytes) {
  allocations_.fetch_add(1, std::memory_order_relaxed);
  const auto now = current_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  auto peak = peak_.load(std::memory_order_relaxed);
  while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

void MemoryCounter::remove(int64_t bytes) {
  current_.fetch_sub(bytes, std::memory_order_relaxed);
}

void MemoryCounter::reset_peak() {
  peak_.store(current(), std::memory_order_relaxed);
}

// ------------------------------------------------------------ Counters of ranks

MemoryCounter& memory_counter() {
  return thread_counter ? *thread_counter : process_counter;
}

MemoryCounter& new_memory_counter() {
  return *new MemoryCounter;
}

void count_memory_of_thread(MemoryCounter* counter) {
  thread_counter = counter;
}

void count_cpu_memory() {
  // Existing tensors keep their own deleters. Has the highest priority, because torch ignores an
  // allocator with a lower priority than the installed one.
  static const bool installed = [] {
    counting_allocator.set_inner(c10::GetCPUAllocator());
    c10::SetCPUAllocator(&counting_allocator, /*priority=*/UINT8_MAX);
    return true;
  }();
  (void)installed;
}

} // namespace fsdp::detail
