#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>

#include <array>
#include <cstddef>

namespace fsdp::detail {

/// The calling thread's autocast settings: for which devices it is on, and its dtypes.
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

/// While this object lives, autocast has the settings of `state`. The outermost guard clears
/// autocast's cache at its end.
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
