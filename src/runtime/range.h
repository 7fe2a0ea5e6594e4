#pragma once

#include <ATen/record_function.h>

#include <string>
#include <string_view>

#include "runtime/log.h"

namespace fsdp::detail {

/// A span of host time. Profilers show it as "FSDP::" followed by both texts. At level debug, the
/// log has a line for its beginning. Costs almost nothing if neither is on.
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
