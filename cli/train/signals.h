#pragma once

#include <thread>

namespace fsdp::cli {

/// Note [How a signal ends a run]
/// The first SIGINT or SIGTERM asks the run to end. The ranks agree on it in their next step, save
/// and end. But a rank that waits for others never gets to its next step, so a thread watches: if
/// the run gives no sign of life, the thread ends the process by the signal.
/// That costs the steps since the newest checkpoint, and nothing else: a checkpoint survives the
/// end of a process at any moment. Before the first step there is nothing to save, and a signal
/// ends the process at once.
///
/// A second signal ends the process at once, too. If it comes within half a second, it is taken for
/// the same one: `timeout` sends each signal twice.
class StopSignals {
 public:
  /// Only one object may exist at a time.
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The first signal that came, or 0. Every call is a sign of life. Any thread may call it.
  static int asked();
  /// From now on a signal lets the run go on as long as it gives signs of life: the next one within
  /// four seconds, or `seconds` if that is longer. This call is a sign of life, too.
  static void expect_within(double seconds);

 private:
  static void watch();

  std::thread watcher_;
};

} // namespace fsdp::cli
