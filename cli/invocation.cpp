#include "cli/invocation.h"

#include <c10/util/StringUtil.h>
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
  auto inside = word;
  c10::ReplaceAll(inside, "'", "'\\''");
  return "'" + inside + "'";
}

std::string invocation() {
  const char* script = std::getenv("FSDP_COMMAND");
  return quoted(script && *script ? script : program_invocation_name);
}

std::vector<char*> exec_words(const std::vector<std::string>& words) {
  std::vector<char*> result;
  for (const auto& word : words) {
    result.push_back(const_cast<char*>(word.c_str()));
  }
  result.push_back(nullptr);
  return result;
}

void replace_process(const std::vector<std::string>& words) {
  auto arguments = exec_words(words);
  arguments.insert(arguments.begin(), program_invocation_name);
  execv("/proc/self/exe", arguments.data());
  throw std::system_error(errno, std::generic_category(), "cannot start fsdp again");
}

std::vector<std::string> own_arguments() {
  std::vector<std::string> words;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  for (std::string word; std::getline(file, word, '\0');) {
    words.push_back(word);
  }
  words.erase(words.begin());
  return words;
}

} // namespace fsdp::cli
