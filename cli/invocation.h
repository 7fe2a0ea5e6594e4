#pragma once

#include <string>

namespace fsdp::cli {

/// A word as a shell takes it: with quotes where it needs them.
std::string quoted(const std::string& word);

/// How to start this tool again from here, for commands that are printed: "fsdp",
/// "./fsdp". The script ./fsdp says it by FSDP_COMMAND; else it is what was typed.
std::string invocation();

} // namespace fsdp::cli
