#include <fsdp/memory.h>

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "observe/live_memory.h"
#include "runtime/counting_allocator.h"
#include "runtime/stream.h"

namespace fsdp {

namespace detail {

namespace {

// Ranks may be threads. Each one visits only its own memory, because the other ranks change theirs
// meanwhile.
std::mutex live_mutex;
std::unordered_map<const LiveMemory*, const MemoryCounter*> all_live; // with its rank's counter

/// The device as tensors have it: with an index, but without one on the CPU.
c10::Device spelled_out(c10::Device device) {
  TORCH_CHECK_VALUE(!device.is_meta(), "[memory_stats] the meta device has no memory");
  return device.is_cpu() || !device.has_index() ? current_device(device.type()) : device;
}

/// Adds up what this rank holds on one device. Several tensors may lie in one storage, the reduced
/// gradients of a group for example: the storage counts once.
void add_live(MemoryStats& stats, c10::Device device) {
  std::unordered_set<const c10::StorageImpl*> seen;
  const auto add = [&](int64_t MemoryStats::* kind, const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage() && tensor.device() == device &&
        seen.insert(tensor.storage().unsafeGetStorageImpl()).second) {
      stats.*kind += static_cast<int64_t>(tensor.storage().nbytes());
    }
  };
  std::lock_guard lock(live_mutex); // another thread may destroy a group of this rank
  for (const auto& [live, rank] : all_live) {
    if (rank == &memory_counter()) {
      live->visit_all(add);
    }
  }
}

} // namespace

LiveMemory::LiveMemory(std::function<void(const MemoryVisitor& visit)> visit_all)
    : visit_all(std::move(visit_all)) {
  std::lock_guard lock(live_mutex);
  all_live.emplace(this, &memory_counter());
}

LiveMemory::~LiveMemory() {
  std::lock_guard lock(live_mutex);
  all_live.erase(this);
}

} // namespace detail

namespace {

/// The allocator of a device that is not the CPU. Torch makes it at the first use of the device,
/// and another thread may be at it: this waits until it is done.
c10::DeviceAllocator* device_allocator(c10::DeviceType type) {
  at::globalContext().lazyInitDevice(type);
  return c10::getDeviceAllocator(type);
}

} // namespace

MemoryStats memory_stats(c10::Device device) {
  device = detail::spelled_out(device);
  MemoryStats stats;
  if (device.is_cpu()) {
    detail::count_cpu_memory();
    stats.allocated = detail::memory_counter().current();
    stats.peak = detail::memory_counter().peak();
  } else if (auto* allocator = device_allocator(device.type()); allocator->initialized()) {
    const auto bytes = allocator->getDeviceStats(device.index()).allocated_bytes;
    const auto& all = bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    stats.allocated = all.current;
    stats.peak = all.peak;
  }
  detail::add_live(stats, device);
  const auto known = stats.shards + stats.gathered + stats.gradients + stats.communication;
  stats.other = std::max<int64_t>(0, stats.allocated - known);
  return stats;
}

void reset_peak_memory_stats(c10::Device device) {
  device = detail::spelled_out(device);
  if (device.is_cpu()) {
    detail::count_cpu_memory();
    detail::memory_counter().reset_peak();
  } else if (auto* allocator = device_allocator(device.type()); allocator->initialized()) {
    allocator->resetPeakStats(device.index());
  }
}

} // namespace fsdp
