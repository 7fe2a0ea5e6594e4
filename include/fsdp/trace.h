#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include <fsdp/export.h>

namespace fsdp {

struct TraceOptions {
  /// Whose memory is counted.
  c10::Device device = c10::kCPU;
  /// Count the memory by category wherever a phase begins or ends.
  bool memory = true;
};

/// While it lives, writes down what this rank (the calling thread) does when:
/// the forward and backward of each sharded module, the optimizers of fsdp::optim,
/// ranges of your own (RECORD_USER_SCOPE), collectives, the time it waited for
/// them, and memory_stats in between. One per thread at a time, made and
/// destroyed by the same thread.
///
///   fsdp::Trace trace;
///   for (...) { trace.begin_step(step); ... }
///   trace.write("trace.json");
///
/// Times are the host's. A collective lasts from its start to when this rank has
/// its result; on an accelerator, where waiting is left to the streams, to when
/// the result was asked for.
class FSDP_API Trace {
 public:
  explicit Trace(const TraceOptions& options = {});
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// A step lasts until the next one begins, or the end.
  void begin_step(int64_t step);
  /// Nothing more is recorded.
  void stop();
  /// How long this rank has waited for collectives so far, in seconds.
  double waited_s() const;

  /// This rank's timeline, as a whole Chrome trace: JSON that Perfetto and
  /// chrome://tracing open. Stops.
  std::string json();
  /// The timelines of all ranks in one file, a process each, written by rank 0;
  /// without a world, that of this thread. Stops. Collective; throws on every
  /// rank when the file cannot be written.
  void write(const std::filesystem::path& path);

 private:
  struct Recorder;
  std::unique_ptr<Recorder> recorder_;
};

/// While it lives, adds up how long this rank (the calling thread) waits for
/// collectives: communication that nothing hides.
class FSDP_API WaitTimer {
 public:
  WaitTimer();
  ~WaitTimer();
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;

  double seconds() const;
  void reset();

 private:
  struct Observer;
  std::unique_ptr<Observer> observer_;
};

} // namespace fsdp
