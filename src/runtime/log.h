#pragma once

#include <cstdint>
#include <string_view>

namespace fsdp::detail {

enum class LogLevel : std::uint8_t { Off, Info, Debug };

/// Returns true if FSDP_LOG asks for this level or a more detailed one. "info" logs once how each
/// root is sharded; "debug" also logs when each operation begins. FSDP_LOG is read once.
bool log_enabled(LogLevel level);

/// Writes the line to stderr as "fsdp info ...". Lines of ranks that are threads do not mix.
void log(LogLevel level, std::string_view line);

} // namespace fsdp::detail
