#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/export.h>

namespace fsdp {

/// Where a sharded module is in its iteration: Idle -> Forward -> Idle ->
/// PreBackward (a gradient of an output arrives) -> PostBackward (those of its
/// inputs are done) -> Idle (end of backward).
enum class TrainingState : std::uint8_t { Idle, Forward, PreBackward, PostBackward };

/// "IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"
FSDP_API const char* to_string(TrainingState state);

enum class EventKind : std::uint8_t { Unshard, Reshard, PostBackward };

namespace detail {
/// Tells all the EventLogs of the calling thread.
void record_event(EventKind kind, const std::string& module, TrainingState state);
} // namespace detail

/// While it lives, writes down in which order this rank (the calling thread)
/// unshards and reshards groups and ends their backward. An unshard that has
/// nothing to do is not an event; nor is a reshard after a forward that keeps
/// its parameters.
class FSDP_API EventLog {
 public:
  using Kind = EventKind;
  struct Event {
    Kind kind = Kind::Unshard;
    std::string module; // from the root; "" is the root, "a, b" one group of two
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
  /// "unshard layers.0 FORWARD"
  std::vector<std::string> lines() const;
  void clear() {
    events_.clear();
  }

 private:
  friend void detail::record_event(EventKind, const std::string&, TrainingState);

  std::vector<Event> events_;
  EventLog* outer_;
};

/// While it lives, counts the collectives that this rank (the calling thread)
/// starts, on every group. Names: all_gather, reduce_scatter, all_reduce,
/// broadcast, scatter, all_to_all, barrier.
class FSDP_API CommDebugMode {
 public:
  struct Call {
    std::string op;
    int64_t bytes = 0;  // of the larger buffer
    std::string group;  // the process group's name
    std::string module; // the sharded module it was for, or ""
  };

  CommDebugMode();
  ~CommDebugMode();
  CommDebugMode(const CommDebugMode&) = delete;
  CommDebugMode& operator=(const CommDebugMode&) = delete;

  int count(const std::string& op) const;
  int64_t bytes(const std::string& op) const;
  int total() const;
  /// In order, with module and group.
  const std::vector<Call>& calls() const;
  void clear();

 private:
  struct Observer;
  std::unique_ptr<Observer> observer_;
};

} // namespace fsdp
