#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

#include <fsdp/trace.h>

namespace fsdp::cli {

/// A few steps of a run, traced into its folder: early, but when all is warm.
/// Every rank makes the same calls.
class StepTrace {
 public:
  /// `before` of the run's `steps` are behind it.
  StepTrace(std::string folder, int64_t before, int64_t steps, c10::Device device);

  /// Before each step, which counts from 1; the file is written when it has all.
  void begin_step(int64_t step);
  /// After the last step, however that came.
  void end();

 private:
  const std::string folder_;
  const c10::Device device_;
  int64_t first_ = 0;
  std::optional<Trace> trace_; // while it is their turn
};

} // namespace fsdp::cli
