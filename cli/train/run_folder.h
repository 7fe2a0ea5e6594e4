#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/train/metric_copies.h"
#include "cli/train/metrics.h"
#include "cli/train/options.h"
#include "cli/train/plan.h"
#include "cli/train/run_lock.h"
#include "cli/train/step_trace.h"
#include "cli/train/trainer.h"

namespace fsdp::cli {

/// Writes the files of a run, see docs/run_folder.md. With --no-save it writes nothing. Calls are
/// collective; rank 0 writes the files that a run has only once.
class RunFolder {
 public:
  /// Makes the folder and locks it. Throws CheckpointError if another run writes there.
  explicit RunFolder(const TrainOptions& options);

  /// Call it before the first update. `before` is the number of steps that a resumed run has
  /// already made.
  void begin(const Plan& plan, c10::Device device, int64_t before);
  /// Call it before each update. `step` updates are done.
  void before_step(int64_t step);
  void add(const StepRecord& record);
  void add(const Validation& validation);
  /// Call it after each update. If a checkpoint is due, it is written while training goes on.
  void after_step(Trainer& trainer, const RunState& run);
  /// Call it after the last update. The last checkpoint is complete when this returns.
  void at_end(Trainer& trainer, const RunState& run);
  /// Writes report.html on rank 0, without the other ranks. Not collective.
  void report();

  bool exists() const {
    return series_.has_value();
  }
  const std::string& path() const {
    return path_;
  }
  /// The path of the newest checkpoint. Empty if there is none.
  std::string latest() const;
  /// On rank 0: what the interruption has cost.
  Lost lost() const {
    return metrics_ ? metrics_->lost() : Lost{};
  }
  /// On rank 0: the losses of the steps before a resumed run, if metrics.jsonl has them.
  std::vector<double> earlier_losses() const;

 private:
  void add_line(const nlohmann::ordered_json& line);

  const TrainOptions& options_;
  std::string path_;
  std::optional<RunLock> lock_; // on rank 0 only
  std::optional<CheckpointSeries> series_;
  std::optional<MetricsFile> metrics_; // on rank 0 only, as the next two
  std::optional<MetricsCsv> csv_;
  std::optional<EventFile> events_;
  std::optional<StepTrace> trace_;
  int64_t recovered_at_ = 0; // the last step that is made again; saved, so as not to be lost twice
};

} // namespace fsdp::cli
