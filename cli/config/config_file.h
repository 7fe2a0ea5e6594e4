#pragma once

#include <string>
#include <vector>

namespace fsdp::cli {

/// The options of a JSON file (by its first letter, '{') or a TOML one, as words of
/// a command line: "--steps=20", and two for an empty value. Names are those of the options, with -
/// or _; sections only group them. Lists and tables become "a,b" and "x=1,y=2". Throws ConfigError
/// that names the file.
std::vector<std::string> config_words(const std::string& path);

/// Replaces `--config FILE` among a command's words by what the file says, in front
/// of all others: of two values the last one holds, so the command line wins. What
/// in the file would contradict it is left out: of a mesh the size of shard, where
/// --ranks is given.
std::vector<std::string> expand_config(const std::vector<std::string>& words);

} // namespace fsdp::cli
