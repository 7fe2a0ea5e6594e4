#pragma once

#include <ATen/record_function.h>

#include <string>
#include <string_view>

#include "runtime/log.h"

namespace fsdp::detail {

/// A stretch of host time that profilers show as "FSDP::" and the two texts, and
/// the log at level debug by a line where it begins. Costs next to nothing while
/// nobody listens.
class Range {
 public:
  explicit Range(std::string_view what, std::string_view label = {})
      : record_(at::RecordScope::USER_SCOPE) {
    if (record_.isActive() || log_enabled(LogLevel::Debug)) {
      begin(what, label);
    }
  }

 private:
  void begin(std::string_view what, std::string_view label);

  at::RecordFunction record_;
};

} // namespace fsdp::detail
