#pragma once

#include <fsdp/process_group.h>

#include <map>
#include <memory>
#include <mutex>

namespace fsdp::detail {

/// Keeps a value for each group of a rank until the group is gone. Each rank has groups of its own,
/// also if ranks are threads, so ranks do not see each other's values.
template <class Value>
class ByGroup {
 public:
  /// Calls `use` with the value of the group, which is a new one the first time. Holds a lock
  /// meanwhile.
  template <class Use>
  auto with(const ProcessGroup& group, const Use& use) {
    std::lock_guard lock(mutex_);
    std::erase_if(values_, [](const auto& item) { return item.first.expired(); });
    return use(values_[group.state_]);
  }

 private:
  // Not the backends: a weak pointer to a backend would delay its end, perhaps until the driver of
  // the GPU is gone.
  using Group = std::weak_ptr<GroupState>;
  std::mutex mutex_;
  std::map<Group, Value, std::owner_less<Group>> values_;
};

} // namespace fsdp::detail
