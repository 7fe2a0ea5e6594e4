#pragma once

#include <regex>
#include <string>
#include <vector>

#include "support/processes.h"

namespace fsdp::test {

/// The built command line tool.
inline const std::string kTool = FSDP_BIN_DIR "/fsdp";

/// The tool must not inherit what a test harness sets.
inline const Environment kClean{{"RANK", ""},        {"WORLD_SIZE", ""},      {"MASTER_ADDR", ""},
                                {"MASTER_PORT", ""}, {"OMP_NUM_THREADS", ""}, {"FSDP_COMMAND", ""}};

inline Ended run(std::vector<std::string> words) {
  words.insert(words.begin(), kTool);
  return run_commands({{words, kClean}})[0];
}

/// As the tool prints its own name.
inline const std::string kPrintedTool =
    kTool.find(' ') == std::string::npos ? kTool : "'" + kTool + "'";

/// A script in which the build's folder is escaped: it may have a space in its name.
inline std::string escaped(std::string script) {
  const std::string folder = FSDP_BIN_DIR;
  const auto in_shell = std::regex_replace(folder, std::regex(" "), "\\ ");
  for (auto at = script.find(folder); in_shell != folder && at != std::string::npos;) {
    script.replace(at, folder.size(), in_shell);
    at = script.find(folder, at + in_shell.size());
  }
  return script;
}

/// The same through a shell: for pipes, terminals, and signals to the tool.
inline Ended run_script(const std::string& script) {
  return run_commands({{{"bash", "-c", escaped(script)}, kClean}})[0];
}

inline int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++found;
  }
  return found;
}

} // namespace fsdp::test
