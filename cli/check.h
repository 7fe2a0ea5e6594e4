#pragma once

#include <c10/util/StringUtil.h>

#include <fsdp/error.h>

namespace fsdp::cli {

/// Numbers that training cannot go on with: NaN or infinity, on every rank alike.
class NonFiniteError : public c10::Error {
  using Error::Error;
};

// Exit codes by kind of error; a signal gives 128 + its number.
inline constexpr int kFailed = 1;
inline constexpr int kBadConfig = 2;
inline constexpr int kCommunication = 3;
inline constexpr int kCheckpoint = 4;
inline constexpr int kNonFinite = 5;

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
