#pragma once

#include <c10/util/StringUtil.h>

#include <fsdp/error.h>

namespace fsdp::cli {

/// Throws ConfigError with a message made of the pieces: it names the option
/// and the way out.
template <class... Pieces>
[[noreturn]] void refuse(const Pieces&... pieces) {
  throw ConfigError({__func__, __FILE__, __LINE__}, c10::str(pieces...));
}

template <class... Pieces>
void check_config(bool good, const Pieces&... pieces) {
  if (!good) {
    refuse(pieces...);
  }
}

} // namespace fsdp::cli
