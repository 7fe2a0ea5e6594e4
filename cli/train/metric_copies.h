#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace fsdp::cli {

/// The file metrics.csv: the steps and validations of metrics.jsonl, as a table.
class MetricsCsv {
 public:
  /// Begins with the lines of `metrics`, the file metrics.jsonl of a run that is resumed.
  MetricsCsv(const std::filesystem::path& path, const std::filesystem::path& metrics);
  /// Adds a line of metrics.jsonl: a step or a validation.
  void add(const nlohmann::ordered_json& line);

 private:
  std::filesystem::path path_;
  std::ofstream file_;
};

/// A file of events for TensorBoard. Each start of a run writes one of its own.
class EventFile {
 public:
  /// `before` steps are done; the folder's first file begins with what `metrics` has of them.
  /// TensorBoard forgets what earlier files have of later steps, because these are made again.
  EventFile(
      const std::filesystem::path& folder, const std::filesystem::path& metrics, int64_t before);
  /// Adds a line of metrics.jsonl: a step or a validation.
  void add(const nlohmann::ordered_json& line);

 private:
  void write(int64_t step, const std::string& what);

  std::filesystem::path path_;
  std::ofstream file_;
};

} // namespace fsdp::cli
