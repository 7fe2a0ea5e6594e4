#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/train/metrics.h"
#include "cli/train/options.h"
#include "cli/train/plan.h"
#include "cli/train/step_trace.h"
#include "cli/train/trainer.h"

namespace fsdp::cli {

/// What a run leaves on disk, as docs/run_folder.md has it; nothing with --no-save. Its calls are
/// collective; rank 0 writes what is written once.
class RunFolder {
 public:
  /// `before` steps are behind a run that goes on.
  RunFolder(const TrainOptions& options, const Plan& plan, c10::Device device, int64_t before);

  /// Before each update; `step` of them are behind.
  void before_step(int64_t step);
  void add(const StepRecord& record);
  void add(const Validation& validation);
  /// After each update, beside the next ones.
  void after_step(Trainer& trainer, const RunState& run);
  /// After the last one: the checkpoint lies there when this returns.
  void at_end(Trainer& trainer, const RunState& run);
  /// The page of all this. Not collective: rank 0 writes it.
  void report();

  bool exists() const {
    return series_.has_value();
  }
  const std::string& path() const {
    return path_;
  }
  /// The newest checkpoint.
  std::string latest() const;
  /// Of the steps before, where they are known.
  std::vector<double> earlier_losses() const;

 private:
  const TrainOptions& options_;
  std::string path_;
  std::optional<CheckpointSeries> series_;
  std::optional<MetricsFile> metrics_; // of rank 0
  std::optional<StepTrace> trace_;
};

} // namespace fsdp::cli
