#include "cli/invocation.h"

#include <errno.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <system_error>

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

void become(const std::vector<std::string>& words) {
  std::vector<char*> arguments{program_invocation_name};
  for (const auto& word : words) {
    arguments.push_back(const_cast<char*>(word.c_str()));
  }
  arguments.push_back(nullptr);
  execv("/proc/self/exe", arguments.data());
  throw std::system_error(errno, std::generic_category(), "fsdp cannot be started again");
}

std::vector<std::string> own_words() {
  std::vector<std::string> words;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  for (std::string word; std::getline(file, word, '\0');) {
    words.push_back(word);
  }
  words.erase(words.begin());
  return words;
}

} // namespace fsdp::cli
