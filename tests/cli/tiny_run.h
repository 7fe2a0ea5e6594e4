#pragma once

// A run of `fsdp train` that takes a second, and what it printed.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cli/tool.h"

namespace fsdp::test {

/// A text that a tiny model learns in a few steps.
inline std::string text_file() {
  const auto path = temporary_folder() + "/text.cpp";
  std::ofstream file(path);
  for (int i = 0; i < 2000; ++i) {
    file << "for (int i = 0; i < " << i << "; ++i) total += row[i];\n";
  }
  return path;
}

/// Options of such a run, which saves where it likes.
inline std::vector<std::string> tiny_options(
    const std::string& data, const std::vector<std::string>& more = {}) {
  std::vector<std::string> words{"train", "--data",  data,   "--dim",    "32", "--layers",
                                 "2",     "--lr",    "1e-2", "--batch",  "8",  "--context",
                                 "32",    "--steps", "30",   "--device", "cpu"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// The same in a folder that goes when the test ends.
inline std::vector<std::string> tiny(const std::string& data, std::vector<std::string> more = {}) {
  more.insert(more.begin(), {"--run", temporary_folder() + "/run"});
  return tiny_options(data, more);
}

inline std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) {
    text += " " + word;
  }
  return text;
}

/// The losses of the steps that were printed.
inline std::vector<double> losses_in(const std::string& output) {
  std::vector<double> losses;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    const auto at = line.find("  loss ");
    if (line.find("step ") != std::string::npos && at != std::string::npos) {
      losses.push_back(std::strtod(line.c_str() + at + 7, nullptr));
    }
  }
  return losses;
}

/// From "loss " on: without seconds.
inline std::string result_in(const std::string& output) {
  const auto start = output.find("result");
  return output.substr(start, output.find("),", output.find("validation")) - start);
}

/// Printed losses have four digits, so 1e-4 may show as two.
inline void expect_equal_losses(const std::string& output, const std::string& other) {
  const auto losses = losses_in(output);
  const auto others = losses_in(other);
  ASSERT_FALSE(losses.empty()) << output;
  ASSERT_EQ(losses.size(), others.size()) << other;
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_NEAR(losses[i], others[i], 2e-4) << "step " << i + 1;
  }
}

/// The lines with `key` of a run's metrics: "loss" of steps, "validation_loss".
inline std::vector<nlohmann::json> metrics_of(
    const std::string& run_folder, const std::string& key = "loss") {
  std::vector<nlohmann::json> lines;
  std::ifstream file(run_folder + "/metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    auto json = nlohmann::json::parse(line);
    if (json.contains(key)) {
      lines.push_back(std::move(json));
    }
  }
  return lines;
}

} // namespace fsdp::test
