#include <fsdp/memory.h>

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "group/param_group.h"
#include "runtime/counting_allocator.h"
#include "runtime/stream.h"

namespace fsdp {

namespace detail {

namespace {

// Ranks may be threads. Each looks at its own groups alone: the others' change
// meanwhile.
std::mutex live_mutex;
std::unordered_map<const FSDPParamGroup*, const MemoryCounter*> live_groups; // and whose

/// As tensors spell it: with an index, but not on the CPU.
c10::Device spelled_out(c10::Device device) {
  TORCH_CHECK_VALUE(!device.is_meta(), "[memory_stats] the meta device has no memory");
  return device.is_cpu() || !device.has_index() ? current_device(device.type()) : device;
}

/// Sums what groups hold on one device. Several tensors may lie in one storage,
/// the reduced gradients of a group for example: it counts once.
void add_groups(MemoryStats& stats, c10::Device device) {
  std::unordered_set<const c10::StorageImpl*> seen;
  const auto add = [&](int64_t MemoryStats::* kind, const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage() && tensor.device() == device &&
        seen.insert(tensor.storage().unsafeGetStorageImpl()).second) {
      stats.*kind += static_cast<int64_t>(tensor.storage().nbytes());
    }
  };
  std::lock_guard lock(live_mutex); // a group of ours may be destroyed by another thread
  for (const auto& [group, owner] : live_groups) {
    if (owner == &memory_counter()) {
      group->visit_memory(add);
    }
  }
}

} // namespace

LiveGroup::LiveGroup(const FSDPParamGroup& group) : group_(group) {
  std::lock_guard lock(live_mutex);
  live_groups.emplace(&group_, &memory_counter());
}

LiveGroup::~LiveGroup() {
  std::lock_guard lock(live_mutex);
  live_groups.erase(&group_);
}

} // namespace detail

MemoryStats memory_stats(c10::Device device) {
  device = detail::spelled_out(device);
  MemoryStats stats;
  if (device.is_cpu()) {
    detail::count_cpu_memory();
    stats.allocated = detail::memory_counter().current();
    stats.peak = detail::memory_counter().peak();
  } else if (auto* allocator = c10::getDeviceAllocator(device.type()); allocator->initialized()) {
    const auto bytes = allocator->getDeviceStats(device.index()).allocated_bytes;
    const auto& all = bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    stats.allocated = all.current;
    stats.peak = all.peak;
  }
  detail::add_groups(stats, device);
  const auto known = stats.shards + stats.gathered + stats.gradients + stats.communication;
  stats.other = std::max<int64_t>(0, stats.allocated - known);
  return stats;
}

void reset_peak_memory_stats(c10::Device device) {
  device = detail::spelled_out(device);
  if (device.is_cpu()) {
    detail::count_cpu_memory();
    detail::memory_counter().reset_peak();
  } else if (auto* allocator = c10::getDeviceAllocator(device.type()); allocator->initialized()) {
    allocator->resetPeakStats(device.index());
  }
}

} // namespace fsdp
