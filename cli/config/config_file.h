#pragma once

#include <map>
#include <string>
#include <vector>

namespace fsdp::cli {

/// Where the options came from that a config file set and the command line did not.
struct ConfigOrigins {
  /// The message with the file and the line in front, if the first option that it names is one of
  /// them.
  std::string named(const std::string& message) const;

  std::map<std::string, std::string> origins; // "--steps" -> "a.toml, line 3"
};

/// Reads a config file and returns its options as words of a command line, such as "--steps=20". An
/// option with an empty value becomes two words. A file that begins with '{' is JSON, any other is
/// TOML. Options have the same names as on the command line, with - or _. Sections only group
/// options. A list becomes "a,b", and the table `mesh` becomes "x=1,y=2". Throws ConfigError with a
/// message that names the file.
std::vector<std::string> config_words(const std::string& path, ConfigOrigins* origins = nullptr);

/// Replaces `--config FILE` in a command's words by the options in the file. They come first, and
/// the last value of an option counts, so the command line wins. Options of the file that
/// contradict the command line are left out. With --ranks, the file's mesh loses its shard axis.
std::vector<std::string> expand_config(
    const std::vector<std::string>& words, ConfigOrigins* origins = nullptr);

} // namespace fsdp::cli
