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

/// The result of one update. It is the same on every rank, except for the memory.
struct StepResult {
  double loss = 0; // before the update, averaged over the whole batch
  double grad_norm = 0;
  double lr = 0;
  bool skipped = false; // fp16 only: no update, because gradients were not finite
  MemoryStats memory;   // of this rank, with the peak of the step
};

/// One update, as a line of metrics.jsonl.
struct StepRecord {
  int64_t step = 0; // counts from 1
  StepResult result;
  int64_t tokens = 0; // since the first step of the run
  double seconds = 0; // of this step
  double tokens_per_s = 0;
  double exposed_s = 0;                   // time spent waiting for communication
  double flops_per_s = 0;                 // of each rank, see flops_per_token
  std::optional<double> utilisation = {}; // of the rank's device, if its peak is known
};

/// The loss on the held-out text after `step` updates.
struct Validation {
  int64_t step = 0;
  double loss = 0;
  double byte_frequency_loss = 0; // see Corpus::frequency_loss
};

/// What an interruption has cost a run that was resumed.
struct Lost {
  int64_t steps = 0;  // that are made again
  double seconds = 0; // that they took, and until the run went on
};

nlohmann::ordered_json to_json(const StepRecord& record);
nlohmann::ordered_json to_json(const Validation& validation);

/// The file metrics.jsonl, with one JSON object per step, validation or interruption. Throws
/// CheckpointError if it cannot be written.
class MetricsFile {
 public:
  /// Opens the file. If a run is resumed after `steps` steps, their lines are kept. Lines of later
  /// steps are dropped, because the resumed run makes these steps again; a line says what that
  /// costs.
  MetricsFile(const std::filesystem::path& path, int64_t steps);

  void add(const nlohmann::ordered_json& line);

  /// The losses of the steps whose lines were kept.
  const std::vector<double>& earlier_losses() const {
    return losses_;
  }
  const Lost& lost() const {
    return lost_;
  }
  /// Returns true if the last validation that was kept came after this step.
  bool has_validation(int64_t step) const {
    return validated_ == step;
  }

 private:
  std::string lines_to_keep(int64_t steps);
  void check() const;

  std::filesystem::path path_;
  std::vector<double> losses_;
  int64_t validated_ = 0;
  Lost lost_;
  std::ofstream file_;
};

} // namespace fsdp::cli
