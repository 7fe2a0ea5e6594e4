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
  std::string token_dtype = "auto"; // of .bin files without a header
  bool processes = false;           // start one process per rank
  bool quiet = false;
  bool json = false;
  bool dry_run = false;
  bool force = false; // begin even if the plan does not fit into memory
  std::string run;    // the folder; empty: runs/<date and time>
  std::string resume;
  bool go_on = false; // with the run in the folder, if there is one
  int restarts = 0;
  int min_ranks = 0;
  bool no_save = false;
  std::optional<int64_t> save_every; // in steps; 0: only at the end
  int64_t validate_every = 0;        // in steps; 0: only at the end
  CheckpointSeriesOptions keep;
  double peak_tflops = 0;      // of a device; 0: as known
  bool csv = false;            // also write metrics.csv
  bool tensorboard = false;    // also write files of events
  std::set<std::string> given; // names of the options on the command line or in --config

  bool saves() const {
    return !no_save && !dry_run;
  }
  /// Call it after `resolve_folder_options`.
  bool saves_on_the_way() const {
    const auto every = save_every.value_or(0);
    return !no_save && every > 0 && every < identity.config.steps;
  }
};

/// Adds all options to the command, in groups.
void add_options(CLI::App& command, TrainOptions& options);

/// Sets what was not given and follows from other options: the sizes of the model from --model or
/// from other sizes, the learning rate from --optimizer, --moments from --shard-dtype. Throws
/// ConfigError if there is no such --model.
void resolve_defaults(TrainOptions& options);
/// Sets options that checkpoints do not hold. Those that were not given become the ones in the
/// folder of a resumed run, which `before` holds. Also decides how often to save.
void resolve_folder_options(TrainOptions& options, const std::optional<TrainOptions>& before);
/// Sets device, mesh and what depends on them, and checks the whole configuration. `launched` is
/// the number of ranks that a launcher has started. Throws ConfigError with a message that names
/// the option and the remedy.
MeshShape resolve_mesh(
    TrainOptions& options, const std::optional<SavedRun>& saved, std::optional<int> launched);
/// Returns true if this process has to start its ranks as processes: with --processes, or if there
/// are several GPUs. Call it after `resolve_mesh`. Throws ConfigError if there are too few GPUs.
bool wants_processes(const TrainOptions& options);
/// Throws ConfigError if options of files and output are out of range or contradict each other.
void check_contradictions(const TrainOptions& options);

/// All settings of the run, by the names of their options. The result is a file for --config.
nlohmann::ordered_json config_json(const TrainOptions& options);
/// Reads what `config_json` returned from a run's folder. Empty if the folder has no such file.
/// Throws CheckpointError if the file is damaged.
std::optional<TrainOptions> read_config_json(const std::filesystem::path& run);
/// Describes a run that ended before its first checkpoint. It starts again at step 0.
SavedRun run_without_checkpoint(const TrainOptions& before, const std::filesystem::path& run);

} // namespace fsdp::cli
