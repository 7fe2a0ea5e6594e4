#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/export.h>

namespace fsdp {

/// The phase of its iteration in which a sharded module is: Idle -> Forward -> Idle -> PreBackward
/// (a gradient of an output has arrived) -> PostBackward (the gradients of its inputs are done) ->
/// Idle (the end of backward).
enum class TrainingState : std::uint8_t { Idle, Forward, PreBackward, PostBackward };

/// "IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"
FSDP_API const char* to_string(TrainingState state);

enum class EventKind : std::uint8_t { Unshard, Reshard, PostBackward };

namespace detail {
/// Adds the event to every EventLog of the calling thread.
void record_event(EventKind kind, const std::string& module, TrainingState state);
} // namespace detail

/// While it exists, records the order in which this rank (the calling thread) unshards and
/// reshards groups of parameters and ends their backward. An unshard is not recorded if the
/// parameters are gathered already. A reshard is not recorded if the forward keeps its
/// parameters.
class FSDP_API EventLog {
 public:
  using Kind = EventKind;
  struct Event {
    Kind kind = Kind::Unshard;
    std::string module; // name from the root; "" is the root, "a, b" a group of two modules
    TrainingState state = TrainingState::Idle;
    bool operator==(const Event&) const = default;
  };

  EventLog();
  ~EventLog();
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  const std::vector<Event>& events() const {
    return events_;
  }
  /// One line per event: "unshard layers.0 FORWARD".
  std::vector<std::string> lines() const;
  void clear() {
    events_.clear();
  }

 private:
  friend void detail::record_event(EventKind, const std::string&, TrainingState);

  std::vector<Event> events_;
  EventLog* outer_;
};

/// While it exists, counts the collectives that this rank (the calling thread) starts, on all
/// process groups. Operations are named all_gather, reduce_scatter, all_reduce, broadcast,
/// scatter, all_to_all and barrier.
class FSDP_API CommDebugMode {
 public:
  struct Call {
    std::string op;
    int64_t bytes = 0;  // of the larger of its two buffers
    std::string group;  // name of the process group
    std::string module; // name of the module that it is for, or ""
  };

  CommDebugMode();
  ~CommDebugMode();
  CommDebugMode(const CommDebugMode&) = delete;
  CommDebugMode& operator=(const CommDebugMode&) = delete;

  int count(const std::string& op) const;
  int64_t bytes(const std::string& op) const;
  int total() const;
  /// All collectives in the order of their start.
  const std::vector<Call>& calls() const;
  void clear();

 private:
  struct Observer;
  std::unique_ptr<Observer> observer_;
};

} // namespace fsdp
