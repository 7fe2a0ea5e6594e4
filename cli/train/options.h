#pragma once

#include <fsdp/checkpoint.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "cli/train/run_checkpoint.h"

namespace fsdp::cli {

/// The command line of `fsdp train`.
struct TrainOptions {
  RunIdentity identity;
  std::string model = "tiny";
  std::optional<int> ranks;
  std::string mesh;
  std::string reshard = "auto";
  std::string device = "auto";
  bool processes = false; // one per rank, started by this one
  bool quiet = false;
  bool json = false;
  bool dry_run = false;
  std::string run; // the folder; empty: runs/<date and time>
  std::string resume;
  bool no_save = false;
  std::optional<int64_t> save_every; // 0: at the end alone
  int64_t validate_every = 0;        // the same
  CheckpointSeriesOptions keep;
  std::set<std::string> given; // by the command line, or by --config

  bool saves() const {
    return !no_save && !dry_run;
  }
};

/// Adds them to the command, in groups.
void add_options(CLI::App& command, TrainOptions& options);

/// What was left open: sizes by --model, then by the checkpoint that is resumed.
/// Throws ConfigError that names the option and the way out.
void resolve_model(TrainOptions& options);
/// What a run's folder says about options that no checkpoint has, where they were
/// not given; and how often to save. `before` is what the folder has.
void resolve_habits(TrainOptions& options, const std::optional<TrainOptions>& before);
/// The same of ranks, mesh and what depends on them, when the number of ranks is
/// known: from a launcher, or none.
MeshShape resolve_mesh(
    TrainOptions& options, const std::optional<SavedRun>& saved, std::optional<int> launched);
/// Whether ranks are to be processes though nobody has launched any: where it was asked
/// for, and one per GPU where there are several. When the mesh is known.
bool wants_processes(const TrainOptions& options);
/// Refuses options that contradict each other.
void check_together(const TrainOptions& options);

/// All that was decided, by the options' names: a file for --config.
nlohmann::ordered_json resolved(const TrainOptions& options);
/// Read back from a run's folder; none where it has no such file. Throws CheckpointError.
std::optional<TrainOptions> read_resolved(const std::filesystem::path& run);
/// A run that was ended before its first checkpoint: it begins again.
SavedRun begun_run(const TrainOptions& before, const std::filesystem::path& run);

} // namespace fsdp::cli
