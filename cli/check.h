#pragma once

#include <c10/util/StringUtil.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <string>

#include <fsdp/error.h>

namespace fsdp::cli {

// Exit codes by kind of error. If a signal ends the tool, the code is 128 + the signal's number.
inline constexpr int kFailed = 1;
inline constexpr int kBadConfig = 2;
inline constexpr int kCommunication = 3;
inline constexpr int kCheckpoint = 4;
inline constexpr int kNonFinite = 5;

/// A second signal within this time is taken for the first one: `timeout` sends each one twice.
inline constexpr std::chrono::milliseconds kSameSignal{500};

/// What to do if a limit of the system caused the error with this errno. Follows the system's
/// words. Empty for other errors.
inline std::string limit_advice(int error) {
  return error == EAGAIN ? "; raise the limit on processes and threads (ulimit -u; in a container "
                           "also pids.max), or start fewer ranks"
         : error == EMFILE ? "; raise the limit on open files (ulimit -n), or start fewer ranks"
                           : "";
}

/// Throws ConfigError. The pieces make up the message, which names the option and the remedy.
template <class... Pieces>
[[noreturn]] void throw_config_error(const Pieces&... pieces) {
  throw ConfigError({__func__, __FILE__, __LINE__}, c10::str(pieces...));
}

/// The same with CheckpointError.
template <class... Pieces>
[[noreturn]] void throw_checkpoint_error(const Pieces&... pieces) {
  throw CheckpointError({__func__, __FILE__, __LINE__}, c10::str(pieces...));
}

/// Calls `throw_config_error` unless `good`.
template <class... Pieces>
void check_config(bool good, const Pieces&... pieces) {
  if (!good) {
    throw_config_error(pieces...);
  }
}

/// Throws ConfigError unless the value of an option is `least` or more.
inline void check_at_least(const char* option, int64_t value, int64_t least) {
  check_config(value >= least, option, " ", value, ": it must be ", least, " or more");
}

} // namespace fsdp::cli
