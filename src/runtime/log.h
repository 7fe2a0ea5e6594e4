#pragma once

#include <cstdint>
#include <string_view>

namespace fsdp::detail {

enum class LogLevel : std::uint8_t { Off, Info, Debug };

/// Whether FSDP_LOG asks for this level or a more talkative one: "info" says
/// once how each root is sharded, "debug" also what happens when. Read once.
bool log_enabled(LogLevel level);

/// "fsdp info ..." on stderr, as one line also when ranks are threads.
void log(LogLevel level, std::string_view line);

} // namespace fsdp::detail
