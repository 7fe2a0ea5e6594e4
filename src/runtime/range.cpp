#include "runtime/range.h"

#include <utility>

namespace fsdp::detail {

void Range::begin(std::string_view what, std::string_view label) {
  std::string name = "FSDP::";
  name.append(what).append(label);
  if (log_enabled(LogLevel::Debug)) {
    log(LogLevel::Debug, name);
  }
  if (record_.isActive()) {
    record_.before(std::move(name));
  }
}

} // namespace fsdp::detail
