#include "process_group/observer.h"

#include <utility>

namespace fsdp::detail {

namespace {

thread_local CollectiveObserver* innermost = nullptr;
thread_local const std::string* label = nullptr;
const std::string no_label;

} // namespace

CollectiveObserver::CollectiveObserver() : outer_(std::exchange(innermost, this)) {}

CollectiveObserver::~CollectiveObserver() {
  auto** at = &innermost;
  while (*at != this) { // not always the innermost
    at = &(*at)->outer_;
  }
  *at = outer_;
}

void CollectiveObserver::notify(const CollectiveCall& call, const std::string& group) {
  for (auto* observer = innermost; observer; observer = observer->outer_) {
    observer->on_collective(call, group, CollectiveLabel::current());
  }
}

CollectiveLabel::CollectiveLabel(const std::string& module)
    : outer_(std::exchange(label, &module)) {}

CollectiveLabel::~CollectiveLabel() {
  label = outer_;
}

const std::string& CollectiveLabel::current() {
  return label ? *label : no_label;
}

} // namespace fsdp::detail
