#pragma once

#include <fsdp/process_group.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <mutex>
#include <utility>

namespace fsdp::detail {

/// What a rank keeps for each of its groups until the group is gone. Each rank has a backend of its
/// own, also if ranks are threads, so ranks do not see each other's values.
template <class Value>
class ByGroup {
 public:
  /// Calls `use` with the value of the group, which is a new one the first time. Holds a lock
  /// meanwhile.
  template <class Use>
  auto with(const ProcessGroup& group, const Use& use) {
    std::lock_guard lock(mutex_);
    std::erase_if(values_, [](const auto& item) { return item.second.first.expired(); });
    const auto& backend = group.backend();
    const auto place = values_.try_emplace(backend.get(), Weak(backend), Value());
    return use(place.first->second.second);
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10d::Backend>; // keeps its address from being used again
  std::mutex mutex_;
  std::map<const c10d::Backend*, std::pair<Weak, Value>> values_;
};

} // namespace fsdp::detail
