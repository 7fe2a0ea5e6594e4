#pragma once

#include <string>
#include <vector>

namespace fsdp::cli {

/// Reads a config file and returns its options as words of a command line, such as "--steps=20". An
/// option with an empty value becomes two words. A file that begins with '{' is JSON, any other is
/// TOML. Options have the same names as on the command line, with - or _. Sections only group
/// options. A list becomes "a,b", and the table `mesh` becomes "x=1,y=2". Throws ConfigError with a
/// message that names the file.
std::vector<std::string> config_words(const std::string& path);

/// Replaces `--config FILE` in a command's words by the options in the file. They come first, and
/// the last value of an option counts, so the command line wins. Options of the file that
/// contradict the command line are left out. With --ranks, the file's mesh loses its shard axis.
std::vector<std::string> expand_config(const std::vector<std::string>& words);

} // namespace fsdp::cli
