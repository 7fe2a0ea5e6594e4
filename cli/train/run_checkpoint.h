#pragma once

#include <fsdp/state_dict.h>

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>

#include "cli/train/trainer.h"

namespace fsdp::cli {

/// Steps whose mean loss is the final training loss.
inline constexpr int64_t kLastSteps = 10;

/// How far a run has come. Batches depend on seed and step alone, so the step is
/// its place in the text too.
struct RunState {
  int64_t step = 0; // updates that are done
  double first_loss = 0;
  torch::Tensor last_losses = torch::zeros({kLastSteps}, torch::kDouble); // step i's at i % size

  void add(double loss);
  int64_t num_last() const;
  double mean_of_last() const;
};

/// What makes a run this one and no other.
struct RunIdentity {
  TrainConfig config;
  std::string data;        // where the text is; empty: LibTorch's headers
  std::string fingerprint; // of the text
};

/// A training checkpoint, as far as it has to be known before a model is built.
struct SavedRun {
  std::filesystem::path path; // of the checkpoint; of the run's folder where there is none yet
  bool has_checkpoint = true;
  bool is_latest = false; // of the run's folder that was asked for
  RunIdentity identity;
  int64_t step = 0;
  int64_t ranks = 0;
  std::string mesh; // as --mesh takes it
};

/// Where the checkpoints of a run lie.
std::filesystem::path checkpoints_of(const std::string& run);

/// The newest complete checkpoint of a run's folder; or `path` is a checkpoint
/// itself. Throws ConfigError where there is none, CheckpointError where it is not
/// one of a training run; `option` asked for it. Not collective, and before there is a world.
SavedRun find_saved_run(const std::string& path, const char* option = "--resume");

/// Options that were not `given` become those of the checkpoint. Refuses, by name,
/// what would make another run of it; --steps and the optimizer's may change.
void adopt_options(RunIdentity& mine, const SavedRun& saved, const std::set<std::string>& given);
/// Refuses another text than that of the checkpoint.
void check_text(const RunIdentity& mine, const SavedRun& saved);

/// All of a training checkpoint; the tensors are the live ones. Collective.
StateDict make_run_state_dict(Trainer& trainer, const RunState& run, const RunIdentity& identity);
/// Goes on where the checkpoint was made. Collective.
void load_run(const SavedRun& saved, Trainer& trainer, RunState& run);

} // namespace fsdp::cli
