#pragma once

namespace fsdp::cli {

/// While an object exists, the first SIGINT or SIGTERM asks the run to end after its current step.
/// A second signal ends the process at once. Only one object may exist at a time.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The first signal that came, or 0. Any thread may call it.
  static int asked();
};

} // namespace fsdp::cli
