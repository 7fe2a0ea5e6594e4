// Allocates the memory of tensors for the thread sanitizer. On ARM, torch uses a library that hands
// memory from one thread to another with atomic variables. The sanitizer does not see those, but it
// knows malloc.
#include <c10/core/CPUAllocator.h>

#include <cstdlib>

namespace {

class MallocAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    constexpr size_t kAlignment = 64; // like torch's own allocator
    TORCH_CHECK(
        nbytes == 0 || posix_memalign(&data, kAlignment, nbytes) == 0,
        "DefaultCPUAllocator: can't allocate memory: ", nbytes, " bytes");
    return {data, data, &std::free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &std::free;
  }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

[[maybe_unused]] const bool installed = [] {
  static MallocAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
  return true;
}();

} // namespace
