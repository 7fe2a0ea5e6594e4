#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/metrics.h"
#include "cli/options.h"
#include "cli/trainer.h"

namespace fsdp::cli {

/// What a run leaves on disk: config.json, metrics.jsonl and checkpoints; nothing
/// with --no-save. Its calls are collective; rank 0 writes what is written once.
class RunFolder {
 public:
  /// `before` steps are behind a run that goes on.
  RunFolder(const TrainOptions& options, int64_t before);

  void add(const StepRecord& record);
  /// After each update, beside the next ones.
  void after_step(Trainer& trainer, const RunState& run);
  /// When the run ends: it lies there when this returns.
  void at_end(Trainer& trainer, const RunState& run);

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
};

} // namespace fsdp::cli
