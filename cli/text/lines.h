#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace fsdp::cli {

/// Calls `visit(line, number)` for each line that is not blank, until it returns false. The first
/// line of the text has the number 1.
template <class Visit>
void for_each_line(std::string_view text, const Visit& visit) {
  for (int64_t number = 1; !text.empty(); ++number) {
    const auto line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.find_first_not_of(" \t\r") != std::string_view::npos && !visit(line, number)) {
      return;
    }
  }
}

} // namespace fsdp::cli
