#pragma once

#include <fsdp/memory.h>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::cli {

/// One update, as metrics.jsonl has it.
struct StepRecord {
  int64_t step = 0; // counts from 1
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
  bool skipped = false; // in fp16: the gradients were not finite
  int64_t tokens = 0;   // so far
  double seconds = 0;   // of this step
  double tokens_per_s = 0;
  std::optional<double> exposed_s; // waiting for communication, where it was measured
  MemoryStats memory;              // of rank 0
};

/// The loss on the held-out text, after so many steps.
struct Validation {
  int64_t step = 0;
  double loss = 0;
  double byte_frequency_loss = 0; // what the frequencies of bytes alone would give
};

nlohmann::ordered_json to_json(const StepRecord& record);
nlohmann::ordered_json to_json(const Validation& validation);

/// A file with one object per step or validation. Throws CheckpointError when it cannot be
/// written.
class MetricsFile {
 public:
  /// Keeps the first `steps` of a run that goes on; those behind were not saved.
  MetricsFile(const std::filesystem::path& path, int64_t steps);

  void add(const nlohmann::ordered_json& line);

  /// Of the steps that were kept.
  const std::vector<double>& earlier_losses() const {
    return losses_;
  }
  /// Whether what was kept has a validation after this step.
  bool has_validation(int64_t step) const {
    return validated_ == step;
  }

 private:
  std::string lines_to_keep(int64_t steps);
  void check() const;

  std::filesystem::path path_;
  std::vector<double> losses_;
  int64_t validated_ = 0;
  std::ofstream file_;
};

/// Writes a small file, all of it or nothing. Throws CheckpointError.
void write_file(const std::filesystem::path& path, const std::string& text);

} // namespace fsdp::cli
