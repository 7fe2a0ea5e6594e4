#include "process_group/observer.h"

#include <atomic>
#include <utility>

namespace fsdp::detail {

namespace {

thread_local CollectiveObserver* innermost = nullptr;
std::atomic<uint64_t> num_observed{0};
thread_local const std::string* label = nullptr;
thread_local const CollectiveLabel::Purpose* label_purpose = nullptr;
const std::string no_label;

} // namespace

CollectiveObserver::CollectiveObserver() : outer_(std::exchange(innermost, this)) {}

CollectiveObserver::~CollectiveObserver() {
  auto** at = &innermost;
  while (*at != this) { // observers may end in another order than they began
    at = &(*at)->outer_;
  }
  *at = outer_;
}

uint64_t CollectiveObserver::notify(const CollectiveCall& call, const std::string& group) {
  if (!innermost) {
    return 0;
  }
  const ObservedCollective started{++num_observed, call, group, CollectiveLabel::current()};
  for (auto* observer = innermost; observer; observer = observer->outer_) {
    observer->on_collective(started);
  }
  return started.id;
}

CollectiveWait::CollectiveWait(uint64_t id) : id_(id) {
  for (auto* observer = innermost; observer; observer = observer->outer_) {
    observer->on_wait_begin(id_);
  }
}

CollectiveWait::~CollectiveWait() {
  for (auto* observer = innermost; observer; observer = observer->outer_) {
    observer->on_wait_end(id_);
  }
}

CollectiveLabel::CollectiveLabel(const std::string& module, const Purpose* purpose)
    : outer_(std::exchange(label, &module)),
      outer_purpose_(std::exchange(label_purpose, purpose)) {}

CollectiveLabel::~CollectiveLabel() {
  label = outer_;
  label_purpose = outer_purpose_;
}

CollectiveLabel::Purpose CollectiveLabel::current_purpose() {
  return label_purpose ? *label_purpose : nullptr;
}

const std::string& CollectiveLabel::current() {
  return label ? *label : no_label;
}

} // namespace fsdp::detail
