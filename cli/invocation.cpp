#include "cli/invocation.h"

#include <errno.h>

#include <cstdlib>

namespace fsdp::cli {

std::string quoted(const std::string& word) {
  const auto* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) {
    return word;
  }
  std::string result = "'";
  for (const char c : word) {
    result += c == '\'' ? "'\\''" : std::string(1, c);
  }
  return result + "'";
}

std::string invocation() {
  const char* script = std::getenv("FSDP_COMMAND");
  return quoted(script && *script ? script : program_invocation_name);
}

} // namespace fsdp::cli
