#include <fsdp/debug.h>

#include <algorithm>
#include <utility>

#include "process_group/observer.h"

namespace fsdp {

namespace {

thread_local EventLog* innermost = nullptr;

const char* to_string(EventLog::Kind kind) {
  switch (kind) {
    case EventLog::Kind::Unshard:
      return "unshard";
    case EventLog::Kind::Reshard:
      return "reshard";
    case EventLog::Kind::PostBackward:
      return "post_backward";
  }
  return "?";
}

} // namespace

const char* to_string(TrainingState state) {
  switch (state) {
    case TrainingState::Idle:
      return "IDLE";
    case TrainingState::Forward:
      return "FORWARD";
    case TrainingState::PreBackward:
      return "PRE_BACKWARD";
    case TrainingState::PostBackward:
      return "POST_BACKWARD";
  }
  return "?";
}

EventLog::EventLog() : outer_(std::exchange(innermost, this)) {}

EventLog::~EventLog() {
  auto** at = &innermost;
  while (*at != this) { // not always the innermost
    at = &(*at)->outer_;
  }
  *at = outer_;
}

void detail::record_event(EventKind kind, const std::string& module, TrainingState state) {
  for (auto* log = innermost; log; log = log->outer_) {
    log->events_.push_back({kind, module, state});
  }
}

std::vector<std::string> EventLog::lines() const {
  std::vector<std::string> lines;
  for (const auto& event : events_) {
    lines.push_back(
        std::string(to_string(event.kind)) + " " + event.module + " " +
        fsdp::to_string(event.state));
  }
  return lines;
}

struct CommDebugMode::Observer : detail::CollectiveObserver {
  void on_collective(const detail::ObservedCollective& started) override {
    calls.push_back(
        {to_string(started.call.kind), started.call.bytes(), started.group, started.module});
  }

  std::vector<Call> calls;
};

CommDebugMode::CommDebugMode() : observer_(std::make_unique<Observer>()) {}

CommDebugMode::~CommDebugMode() = default;

int CommDebugMode::count(const std::string& op) const {
  return static_cast<int>(std::count_if(
      calls().begin(), calls().end(), [&](const auto& call) { return call.op == op; }));
}

int64_t CommDebugMode::bytes(const std::string& op) const {
  int64_t sum = 0;
  for (const auto& call : calls()) {
    sum += call.op == op ? call.bytes : 0;
  }
  return sum;
}

int CommDebugMode::total() const {
  return static_cast<int>(calls().size());
}

const std::vector<CommDebugMode::Call>& CommDebugMode::calls() const {
  return observer_->calls;
}

void CommDebugMode::clear() {
  observer_->calls.clear();
}

} // namespace fsdp
