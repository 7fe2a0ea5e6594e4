#pragma once

#include <cstddef>

namespace fsdp::cli {

/// How many bytes a character of UTF-8 has that begins with this one.
inline size_t character_length(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0xc0 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

} // namespace fsdp::cli
