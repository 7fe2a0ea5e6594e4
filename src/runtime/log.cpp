#include "runtime/log.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace fsdp::detail {

namespace {

LogLevel level_of_environment() {
  const char* value = std::getenv("FSDP_LOG");
  const std::string_view name = value ? value : "";
  if (name == "info") {
    return LogLevel::Info;
  }
  if (name == "debug") {
    return LogLevel::Debug;
  }
  if (!name.empty() && name != "off") {
    TORCH_WARN("FSDP_LOG=", name, " is not known; it may be info, debug or off");
  }
  return LogLevel::Off;
}

} // namespace

bool log_enabled(LogLevel level) {
  static const auto enabled = level_of_environment();
  return level <= enabled;
}

void log(LogLevel level, std::string_view line) {
  std::string text = level == LogLevel::Debug ? "fsdp debug " : "fsdp info ";
  text.append(line).append("\n");
  std::fwrite(text.data(), 1, text.size(), stderr); // one call, so that lines stay whole
}

} // namespace fsdp::detail
