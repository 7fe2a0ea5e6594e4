#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include <fsdp/export.h>

namespace fsdp {

struct TraceOptions {
  /// The device whose memory is counted.
  c10::Device device = c10::kCPU;
  /// Whether to record memory_stats where phases begin and end.
  bool memory = true;
};

/// While it exists, records a timeline of this rank (the calling thread): the forward and
/// backward of each sharded module, the optimizers of fsdp::optim, your own ranges
/// (RECORD_USER_SCOPE), collectives, the time spent waiting for them, and memory. A thread may
/// have one Trace at a time, and must destroy it itself.
///
///   fsdp::Trace trace;
///   for (...) { trace.begin_step(step); ... }
///   trace.write("trace.json");
///
/// Times are those of the host. A collective lasts from its start until this rank has its result.
/// On an accelerator the host does not wait for the result, so there a collective lasts until the
/// result is asked for.
class FSDP_API Trace {
 public:
  explicit Trace(const TraceOptions& options = {});
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// A step lasts until the next one begins, or until recording stops.
  void begin_step(int64_t step);
  /// Stops recording.
  void stop();
  /// How many seconds this rank has waited for collectives so far.
  double waited_s() const;

  /// Stops recording, and returns this rank's timeline as a complete Chrome trace: JSON that
  /// Perfetto and chrome://tracing can open.
  std::string json();
  /// Stops recording, and writes the timelines of all ranks into one file, on rank 0. Each rank
  /// appears as a process. Without a process group, writes this thread's timeline. Throws on
  /// every rank if the file cannot be written. Collective.
  void write(const std::filesystem::path& path);

 private:
  struct Recorder;
  std::unique_ptr<Recorder> recorder_;
};

/// While it exists, adds up the time that this rank (the calling thread) waits for collectives,
/// which is the communication time that compute does not hide.
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
