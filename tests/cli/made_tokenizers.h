// The tokenizers that tokenizers_made.py has made.
#pragma once

#include <fsdp/error.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/files.h"
#include "cli/text/tokenizer.h"
#include "support/processes.h"

namespace fsdp::test {

/// The folder that tokenizers_made.py has filled, and the names of the good ones in it. Where
/// nothing can be tested, `skipped` says why.
struct MadeTokenizers {
  std::string folder;
  std::vector<std::string> names;
  std::string skipped;
};

inline const MadeTokenizers& made() {
  static const MadeTokenizers all = [] {
    MadeTokenizers result;
    const std::string python = FSDP_TEST_PYTHON;
    if (python.empty() ||
        run_commands({{{python, "-c", "import transformers"}, {}}})[0].exit_code != 0) {
      result.skipped = "transformers is not installed";
      return result;
    }
    result.folder = temporary_folder();
    const auto ended =
        run_commands({{{python, FSDP_TEST_DIR "/cli/tokenizers_made.py", result.folder}, {}}})[0];
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    for (const auto& entry : std::filesystem::directory_iterator(result.folder)) {
      if (cli::is_file(entry.path() / "expected.json")) {
        result.names.push_back(entry.path().filename());
      }
    }
    EXPECT_EQ(result.names.size(), 5u) << ended.output;
    try {
      cli::Tokenizer::read(result.folder + "/llama3");
    } catch (const ConfigError& error) {
      const std::string message = error.what_without_backtrace();
      if (message.find("was built without") != std::string::npos) {
        result.skipped = message;
      }
    }
    return result;
  }();
  return all;
}

#define SKIP_WITHOUT_TOKENIZERS()               \
  if (!fsdp::test::made().skipped.empty()) {    \
    GTEST_SKIP() << fsdp::test::made().skipped; \
  }

inline nlohmann::json json_of(const std::string& path) {
  return nlohmann::json::parse(cli::read_file(made().folder + "/" + path).value());
}

} // namespace fsdp::test
