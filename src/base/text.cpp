#include "base/text.h"

#include <charconv>

#include "base/check.h"

namespace fsdp::detail {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  size_t start = 0;
  while (true) {
    const size_t end = text.find(separator, start);
    parts.emplace_back(text.substr(start, end - start));
    if (end == std::string_view::npos) {
      return parts;
    }
    start = end + 1;
  }
}

int64_t parse_int(std::string_view text, std::string_view what) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  FSDP_CHECK_AS(
      ConfigError, error == std::errc() && end == text.data() + text.size(), what, " is '", text,
      "', which is not a whole number");
  return value;
}

} // namespace fsdp::detail
