#pragma once

#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::detail {

/// "0, 2, 3": for messages.
template <class Range>
std::string join(const Range& items, std::string_view separator = ", ") {
  std::ostringstream out;
  bool first = true;
  for (const auto& item : items) {
    if (!first) {
      out << separator;
    }
    out << item;
    first = false;
  }
  return out.str();
}

/// The parts of `text` between separators; empty parts are kept.
std::vector<std::string> split(std::string_view text, char separator);

/// The whole of `text` as a number; throws ConfigError that names `what`.
int64_t parse_int(std::string_view text, std::string_view what);

} // namespace fsdp::detail
