#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>

#include <array>
#include <cstddef>

namespace fsdp::detail {

/// Where autocast is on, and what it casts to, in the calling thread.
struct AutocastState {
  static constexpr std::array kTypes{c10::kCPU, c10::kCUDA};

  static AutocastState current() {
    AutocastState state{.cache = at::autocast::is_autocast_cache_enabled()};
    for (size_t i = 0; i < kTypes.size(); ++i) {
      state.enabled[i] = at::autocast::is_autocast_enabled(kTypes[i]);
      state.dtypes[i] = at::autocast::get_autocast_dtype(kTypes[i]);
    }
    return state;
  }
  void set() const {
    at::autocast::set_autocast_cache_enabled(cache);
    for (size_t i = 0; i < kTypes.size(); ++i) {
      at::autocast::set_autocast_enabled(kTypes[i], enabled[i]);
      at::autocast::set_autocast_dtype(kTypes[i], dtypes[i]);
    }
  }

  bool cache = false;
  std::array<bool, kTypes.size()> enabled{};
  std::array<at::ScalarType, kTypes.size()> dtypes{};
};

/// While it lives, autocast is as it was then. What it caches goes at the end.
class AutocastGuard {
 public:
  explicit AutocastGuard(const AutocastState& state) {
    at::autocast::increment_nesting();
    state.set();
  }
  ~AutocastGuard() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    before_.set();
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  const AutocastState before_ = AutocastState::current();
};

} // namespace fsdp::detail
