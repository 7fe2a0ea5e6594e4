#pragma once

namespace fsdp::cli {

/// While it lives, SIGINT and SIGTERM ask the run to end after its step instead
/// of ending the process; a second one of either ends it at once. One at a time.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that came, 0 if none did. For any thread.
  static int asked();
};

} // namespace fsdp::cli
