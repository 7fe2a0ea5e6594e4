// The tokenizers that tokenizers_made.py and sentencepiece_made.py have made.
#pragma once

#include <fsdp/error.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/files.h"
#include "cli/text/tokenizer.h"
#include "support/processes.h"

namespace fsdp::test {

/// The folder that a script has filled, and the names of the good ones in it. Where nothing can be
/// tested, `skipped` says why.
struct MadeTokenizers {
  std::string folder;
  std::vector<std::string> names;
  std::string skipped;
};

/// `some`: the name of a good one.
inline MadeTokenizers make_tokenizers(
    const std::string& script, const std::string& some, size_t count) {
  MadeTokenizers result;
  const std::string python = FSDP_TEST_PYTHON;
  if (python.empty() ||
      run_commands({{{python, "-c", "import transformers"}, {}}})[0].exit_code != 0) {
    result.skipped = "transformers is not installed";
    return result;
  }
  result.folder = temporary_folder();
  const auto ended =
      run_commands({{{python, FSDP_TEST_DIR "/cli/" + script, result.folder}, {}}})[0];
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  for (const auto& entry : std::filesystem::directory_iterator(result.folder)) {
    if (cli::is_file(entry.path() / "expected.json")) {
      result.names.push_back(entry.path().filename());
    }
  }
  EXPECT_EQ(result.names.size(), count) << ended.output;
  try {
    cli::Tokenizer::read(result.folder + "/" + some);
  } catch (const ConfigError& error) {
    const std::string message = error.what_without_backtrace();
    if (message.find("was built without") != std::string::npos) {
      result.skipped = message;
    }
  }
  return result;
}

/// Byte-level ones.
inline const MadeTokenizers& made() {
  static const MadeTokenizers all = make_tokenizers("tokenizers_made.py", "llama3", 5);
  return all;
}

/// Those of SentencePiece's kind.
inline const MadeTokenizers& made_sentencepiece() {
  static const MadeTokenizers all = make_tokenizers("sentencepiece_made.py", "llama2", 7);
  return all;
}

#define SKIP_WITHOUT_TOKENIZERS()               \
  if (!fsdp::test::made().skipped.empty()) {    \
    GTEST_SKIP() << fsdp::test::made().skipped; \
  }

#define SKIP_WITHOUT_SENTENCEPIECE()                          \
  if (!fsdp::test::made_sentencepiece().skipped.empty()) {    \
    GTEST_SKIP() << fsdp::test::made_sentencepiece().skipped; \
  }

inline nlohmann::json json_of(const std::string& path, const MadeTokenizers& all = made()) {
  return nlohmann::json::parse(cli::read_file(all.folder + "/" + path).value());
}

/// Reports the first token that differs.
inline void expect_tokens(const std::vector<int64_t>& found, const std::vector<int64_t>& expected) {
  if (found == expected) {
    return;
  }
  const auto at =
      std::mismatch(found.begin(), found.end(), expected.begin(), expected.end()).first -
      found.begin();
  const auto from = [&](const std::vector<int64_t>& tokens) {
    const auto end = std::min<std::ptrdiff_t>(std::ssize(tokens), at + 8);
    return testing::PrintToString(std::vector<int64_t>(tokens.begin() + at, tokens.begin() + end));
  };
  ADD_FAILURE() << "token " << at << " differs: " << found.size() << " tokens with " << from(found)
                << " there, expected " << expected.size() << " with " << from(expected);
}

} // namespace fsdp::test
