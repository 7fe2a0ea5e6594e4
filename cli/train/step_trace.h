#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

#include <fsdp/trace.h>

namespace fsdp::cli {

/// Traces a few early steps of a run, after a warm-up, and writes the trace into the run's folder.
/// Every rank makes the same calls.
class StepTrace {
 public:
  /// `before` of the run's `steps` steps are already done.
  StepTrace(std::string folder, int64_t before, int64_t steps, c10::Device device);

  /// Call it before each step. Steps count from 1. Writes the file after the last traced step.
  void begin_step(int64_t step);
  /// Call it after the last step, also if a signal ended the run early.
  void end();

 private:
  const std::string folder_;
  const c10::Device device_;
  int64_t first_ = 0;
  std::optional<Trace> trace_; // only during the traced steps
};

} // namespace fsdp::cli
