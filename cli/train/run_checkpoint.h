#pragma once

#include <fsdp/state_dict.h>

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "cli/train/trainer.h"

namespace fsdp::cli {

/// The final training loss is the mean over this many last steps.
inline constexpr int64_t kLastSteps = 10;

/// The progress of a run. Batches depend only on seed and step, so the position in the text does
/// not have to be saved.
struct RunState {
  int64_t step = 0; // how many updates are done
  double first_loss = 0;
  /// The loss of step i is at i % kLastSteps.
  torch::Tensor last_losses = torch::zeros({kLastSteps}, torch::kDouble);

  void add(double loss);
  int64_t num_last() const;
  double mean_of_last() const;
};

/// The settings and the text of a run, which decide its result.
struct RunIdentity {
  TrainConfig config;
  std::string data;        // the path of the text; empty: LibTorch's headers
  std::string fingerprint; // of the text
  std::string weights;     // the fingerprint of the weights that LoRA leaves as they are
};

/// A value that all checkpoints of `fsdp train` have, and no others.
inline constexpr const char* kRunMark = "train.ranks";

/// What has to be known about a training checkpoint before the model is built.
struct SavedRun {
  std::filesystem::path path; // of the checkpoint, or of the run's folder if it has none yet
  bool has_checkpoint = true;
  bool is_latest = false; // a run's folder was given, and this is its newest checkpoint
  RunIdentity identity;
  int64_t step = 0;
  int64_t ranks = 0;
  std::string mesh; // as --mesh takes it
  /// Newer checkpoints of the run that are damaged or incomplete: their paths, and why.
  std::vector<std::string> skipped = {};
};

/// The folder of a run's checkpoints.
std::filesystem::path checkpoints_of(const std::string& run);

/// Describes each checkpoint of a run that cannot be used and has a later step than `step`.
std::vector<std::string> skipped_checkpoints(
    const std::filesystem::path& checkpoints, int64_t step);

/// Reads the newest complete checkpoint of a run's folder or of a folder of checkpoints, or the
/// checkpoint at `path`. Throws ConfigError with a message that names `option` if there is none,
/// and CheckpointError if it does not hold the settings of `fsdp train`, or, unless `model_only`,
/// the progress of the run. Not collective: it needs no process group.
SavedRun find_saved_run(
    const std::string& path, const char* option = "--resume", bool model_only = false);

/// Says on stderr which newer checkpoints are not used, and why.
void warn_of_skipped(const SavedRun& saved);

/// Sets options that were not `given` to those of the checkpoint. Throws ConfigError if a fixed
/// option differs from the checkpoint, or if the checkpoint is already beyond --steps.
void adopt_options(RunIdentity& mine, const SavedRun& saved, const std::set<std::string>& given);
/// Throws ConfigError if the checkpoint was trained on another text.
void check_text(const RunIdentity& mine, const SavedRun& saved);
/// Throws ConfigError if the checkpoint is of LoRA and the weights in this folder are not those
/// that it was trained with.
void check_weights(const SavedRun& saved, const std::string& folder);

/// Everything that a training checkpoint holds. Its tensors are those of the trainer, not copies.
/// Collective.
StateDict make_run_state_dict(Trainer& trainer, const RunState& run, const RunIdentity& identity);
/// Loads a checkpoint into `trainer` and `run`. Collective.
void load_run(const SavedRun& saved, Trainer& trainer, RunState& run);
/// The same, for a run that goes on by itself: if the checkpoint is damaged, says so on stderr and
/// takes the next older one of the run. Returns the one that was loaded. Collective.
SavedRun load_newest_good(SavedRun saved, Trainer& trainer, RunState& run);

} // namespace fsdp::cli
