#pragma once

#include <ATen/record_function.h>

#include <array>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "measure.h"
#include "overhead_model.h"

namespace bench {

/// The phases of a step in which the engine works. overhead.py has the same phases.
enum Phase { PreForward, PostForward, PreBackward, PostBackward, Final, kPhases };
constexpr const char* kPhaseNames[] = {
    "pre_forward", "post_forward", "pre_backward", "post_backward", "final"};

/// Seconds per step.
using PhaseTimes = std::array<double, kPhases>;

/// Adds the time inside the engine's named ranges to the innermost phase.
struct PhaseState {
  static constexpr int kNone = -1;

  clockid_t clock = CLOCK_MONOTONIC;
  PhaseTimes times{};
  std::vector<int> inside{};
  double since = 0;

  static int phase_of(std::string_view name) {
    static constexpr std::pair<std::string_view, Phase> kRanges[] = {
        {"FSDP::root_pre_forward", PreForward},      {"FSDP::inputs_to_device", PreForward},
        {"FSDP::cast_forward_inputs", PreForward},   {"FSDP::pre_forward", PreForward},
        {"FSDP::forward_prefetch", PreForward},      {"FSDP::post_forward", PostForward},
        {"FSDP::cast_forward_outputs", PostForward}, {"FSDP::pre_backward", PreBackward},
        {"FSDP::backward_prefetch", PreBackward},    {"FSDP::post_backward", PostBackward},
        {"FSDP::root_post_backward_callback", Final}};
    for (const auto& [prefix, phase] : kRanges) {
      if (name.starts_with(prefix)) {
        return phase;
      }
    }
    return kNone; // a range inside one of these
  }
  void charge() {
    const auto time = now(clock);
    if (!inside.empty() && inside.back() != kNone) {
      times[inside.back()] += time - since;
    }
    since = time;
  }
  void enter(std::string_view name) {
    charge();
    const auto phase = phase_of(name);
    const auto outer = inside.empty() ? kNone : inside.back();
    inside.push_back(phase == kNone ? outer : phase);
  }
  void leave() {
    charge();
    inside.pop_back();
  }
};
inline thread_local PhaseState phase_state; // global, because callbacks are plain functions

/// While this object lives, adds up the time inside the engine's ranges: each instant
/// counts for the innermost phase. A range costs more while somebody listens, because
/// its name is built then. So the rounds that are compared run without this clock.
class PhaseClock {
 public:
  explicit PhaseClock(clockid_t clock) {
    phase_state = {.clock = clock};
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(
            [](const at::RecordFunction& range) {
              phase_state.enter(range.name());
              return std::unique_ptr<at::ObserverContext>();
            },
            [](const at::RecordFunction&, at::ObserverContext*) { phase_state.leave(); })
            .scopes({at::RecordScope::USER_SCOPE}));
  }
  ~PhaseClock() {
    at::removeCallback(handle_);
  }
  PhaseClock(const PhaseClock&) = delete;
  PhaseClock& operator=(const PhaseClock&) = delete;

  /// Returns the times since the last call.
  PhaseTimes take() {
    return std::exchange(phase_state.times, {});
  }

 private:
  at::CallbackHandle handle_;
};

/// Returns medians over `steps` steps.
inline PhaseTimes time_phases(Model& model, int steps, clockid_t clock) {
  PhaseClock phases(clock);
  std::array<std::vector<double>, kPhases> times;
  model.step();
  phases.take();
  for (int i = 0; i < steps; ++i) {
    model.step();
    const auto step = phases.take();
    for (int phase = 0; phase < kPhases; ++phase) {
      times[phase].push_back(step[phase]);
    }
  }
  PhaseTimes result;
  for (int phase = 0; phase < kPhases; ++phase) {
    result[phase] = median(times[phase]);
  }
  return result;
}

} // namespace bench
