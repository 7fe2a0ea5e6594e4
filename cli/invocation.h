#pragma once

#include <string>
#include <vector>

namespace fsdp::cli {

/// The word as it is typed in a shell: in quotes if it needs them.
std::string quoted(const std::string& word);

/// How the user starts this tool, for commands that are printed: "fsdp", "./fsdp". The script
/// ./fsdp passes it in FSDP_COMMAND. Without that variable it is the name that was typed.
std::string invocation();

/// The words as a null-terminated array for exec. The pointers are valid as long as `words`.
std::vector<char*> exec_words(const std::vector<std::string>& words);

/// Replaces this process by this tool with other arguments. Call it before any work has begun.
/// Throws std::system_error if that fails.
[[noreturn]] void replace_process(const std::vector<std::string>& words);
/// The arguments that this process was started with, without the program's name.
std::vector<std::string> own_arguments();

} // namespace fsdp::cli
