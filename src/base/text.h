#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::detail {

/// Joins the items into text for messages, for example "0, 2, 3".
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

/// Returns the text by which messages name a module, for example "module 'layers.0'".
inline std::string module_text(const std::string& name) {
  return name.empty() ? "the root module" : "module '" + name + "'";
}

/// Returns the parts of `text` between separators. Keeps empty parts.
std::vector<std::string> split(std::string_view text, char separator);

/// Parses all of `text` as a whole number. Throws ConfigError if it is none; `what` names the value
/// in the message.
int64_t parse_int(std::string_view text, std::string_view what);

/// Returns the number that the bytes hold, the lowest byte first.
inline uint64_t little_endian(std::string_view bytes) {
  uint64_t number = 0;
  for (size_t i = bytes.size(); i-- > 0;) {
    number = number << 8 | static_cast<unsigned char>(bytes[i]);
  }
  return number;
}

} // namespace fsdp::detail
