#pragma once

#include <string>
#include <vector>

namespace fsdp::cli {

/// A word as a shell takes it: with quotes where it needs them.
std::string quoted(const std::string& word);

/// How to start this tool again from here, for commands that are printed: "fsdp",
/// "./fsdp". The script ./fsdp says it by FSDP_COMMAND; else it is what was typed.
std::string invocation();

/// As exec takes them: valid as long as the words.
std::vector<char*> exec_words(const std::vector<std::string>& words);

/// Runs this tool with other words in place of this process, which has not begun any work.
/// Comes back only to throw.
[[noreturn]] void become(const std::vector<std::string>& words);
/// The words that it was started with, behind its name.
std::vector<std::string> own_words();

} // namespace fsdp::cli
