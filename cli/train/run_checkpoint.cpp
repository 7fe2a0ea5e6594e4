#include "cli/train/run_checkpoint.h"

#include <fsdp/checkpoint.h>
#include <fsdp/checkpoint_tools.h>
#include <fsdp/distributed.h>
#include <fsdp/random_state.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <variant>

#include "cli/check.h"
#include "cli/config/option_list.h"
#include "cli/files.h"
#include "cli/train/pretrained.h"
#include "cli/train/progress.h"

namespace fsdp::cli {

namespace {

// The keys of a training checkpoint: model.*, optim.* and scaler.* are the Trainer's, random.* the
// random generators. train.* is RunState with ranks and mesh, config.* the options by their names,
// data.* the path and fingerprint of the text. from.fingerprint is that of the weights which LoRA
// leaves as they are: model.* does not hold them.

/// Calls `visit(key, value)` for all that `saved` has from a checkpoint.
template <class Visit>
void for_each_value(SavedRun& saved, Visit visit) {
  auto& [config, data, fingerprint, weights] = saved.identity;
  for_each_option(
      [&](const char* name, auto in, bool) { visit(std::string("config.") + name, in(config)); });
  visit("data.path", data);
  visit("data.fingerprint", fingerprint);
  visit("from.fingerprint", weights);
  visit("train.step", saved.step);
  visit(kRunMark, saved.ranks);
  visit("train.mesh", saved.mesh);
}

/// Throws CheckpointError if the value has another type: the checkpoint may be of another program.
template <class T>
T value_of(const StateDict& state, const std::string& key, const std::filesystem::path& path) {
  const auto* value = std::get_if<T>(&state.at(key));
  if (!value) {
    throw_checkpoint_error(
        path.string(), ": '", key, "' has another type than in checkpoints of fsdp train");
  }
  return *value;
}

/// Advice to resume from another checkpoint of the run. Empty if there is none.
std::string advice_instead_of(const std::filesystem::path& checkpoint) {
  std::string other;
  for (const auto& [step, path] : CheckpointSeries(checkpoint.parent_path() / ".").list()) {
    other = path.filename() == checkpoint.filename() ? other : path.string();
  }
  return other.empty() ? "" : "; to resume from another one: --resume " + other;
}

constexpr const char* kConvertAdvice =
    "; fsdp convert writes what can be used if --rename is left out, and if --only, where it is "
    "given, matches model.*, config.* and from.*; to resume from it, also use --format sharded";

/// Whether safetensors files without a manifest lie there.
bool is_foreign_checkpoint(const std::string& path) {
  try {
    return !inspect_checkpoint(path).is_ours;
  } catch (const CheckpointError&) {
    return false;
  }
}

void insert_losses(StateDict& state, const RunState& run) {
  state.insert("train.first_loss", run.first_loss);
  state.insert("train.last_losses", run.last_losses);
}

} // namespace

void RunState::add(double loss) {
  first_loss = step == 0 ? loss : first_loss;
  last_losses[step % kLastSteps] = loss;
  ++step;
}

int64_t RunState::num_last() const {
  return std::min(step, kLastSteps);
}

double RunState::mean_of_last() const {
  return last_losses.narrow(0, 0, num_last()).mean().item<double>();
}

std::filesystem::path checkpoints_of(const std::string& run) {
  return std::filesystem::path(run) / "checkpoints";
}

std::vector<std::string> skipped_checkpoints(
    const std::filesystem::path& checkpoints, int64_t step) {
  std::vector<std::string> skipped;
  std::set<std::filesystem::path> complete;
  for (const auto& [number, path] : CheckpointSeries(checkpoints).list()) {
    complete.insert(path.filename());
  }
  std::error_code none; // a run may have no such folder yet
  for (const auto& entry : std::filesystem::directory_iterator(checkpoints, none)) {
    const auto name = entry.path().filename().string();
    long long number = 0;
    int length = 0;
    if (std::sscanf(name.c_str(), "step_%18lld%n", &number, &length) != 1 ||
        length != static_cast<int>(name.size()) || number <= step || complete.contains(name)) {
      continue;
    }
    auto why = entry.path().string() + " has no manifest.json, so it does not hold all of the run";
    if (is_file(entry.path() / "manifest.json")) {
      try {
        (void)inspect_checkpoint(entry.path());
      } catch (const CheckpointError& error) {
        why = error.what_without_backtrace();
      }
    }
    skipped.push_back(why);
  }
  std::sort(skipped.begin(), skipped.end());
  return skipped;
}

SavedRun find_saved_run(const std::string& path, const char* option, bool model_only) {
  SavedRun saved;
  std::optional<std::filesystem::path> latest;
  if (is_folder(path)) {
    latest = CheckpointSeries(checkpoints_of(path)).latest();
    saved.is_latest = latest.has_value();
    latest = latest ? latest : CheckpointSeries(path).latest();
  }
  saved.path = latest.value_or(path);
  if (!latest && !is_file(saved.path / "manifest.json")) {
    const bool is_foreign = is_foreign_checkpoint(path);
    check_config(
        model_only && is_foreign, option, ": ", path, " is not a checkpoint, and ",
        checkpoints_of(path).string(), " has no complete one", is_foreign ? kConvertAdvice : "");
  }
  const auto values = inspect_checkpoint(saved.path).values;
  const auto has = [&](const char* name) {
    return std::ranges::any_of(values, [&](const auto& value) { return value.first == name; });
  };
  if (!has("config.dim") || !(model_only || has(kRunMark))) {
    throw_checkpoint_error(
        saved.path.string(), " is a checkpoint, but not one of fsdp train", kConvertAdvice);
  }
  StateDict state;
  for_each_value(
      saved, [&](const std::string& key, const auto& value) { state.insert(key, value); });
  load(state, saved.path, {.strict = false});
  for_each_value(saved, [&]<class T>(const std::string& key, T& value) {
    value = value_of<T>(state, key, saved.path);
  });
  if (latest) {
    saved.skipped = skipped_checkpoints(saved.path.parent_path(), saved.step);
  }
  return saved;
}

void warn_of_skipped(const SavedRun& saved) {
  for (const auto& why : saved.skipped) {
    std::cerr << "fsdp: WARNING: a newer checkpoint is skipped: " << printable(why)
              << "; going on from " << printable(saved.path.string()) << ", step " << saved.step
              << std::endl;
  }
}

void adopt_options(RunIdentity& mine, const SavedRun& saved, const std::set<std::string>& given) {
  for_each_option([&](const char* name, auto in, bool fixed) {
    auto& value = in(mine.config);
    const auto& theirs = in(saved.identity.config);
    // `check_weights` compares the weights themselves.
    const bool may_move = name == std::string("from") && saved.identity.config.has_lora();
    if (!given.contains(name)) {
      value = theirs;
    }
    check_config(
        !fixed || value == theirs || may_move, "--", name, " ", value, ": ", saved.path.string(),
        " is of a run with --", name, " ", theirs,
        "; leave it out to continue that run, or leave out --resume to start another");
  });
  check_config(
      mine.config.steps >= saved.step, "--steps ", mine.config.steps, ": ", saved.path.string(),
      " has already made ", saved.step);
  if (!given.contains("data")) {
    mine.data = saved.identity.data;
  }
}

void check_text(const RunIdentity& mine, const SavedRun& saved) {
  const auto name = [](const RunIdentity& run) {
    return run.data.empty() ? std::string("LibTorch's headers") : run.data;
  };
  check_config(
      !saved.has_checkpoint || mine.fingerprint == saved.identity.fingerprint,
      "--data: the text of ", name(mine), " is not the one that ", saved.path.string(),
      " was trained on (",
      mine.data == saved.identity.data ? "it has changed since, or --token-dtype is another"
                                       : name(saved.identity),
      "); leave out --resume to start another run");
}

void check_weights(const SavedRun& saved, const std::string& folder) {
  const auto& weights = saved.identity.weights;
  if (!saved.has_checkpoint || !saved.identity.config.has_lora()) {
    return;
  }
  const auto about = saved.path.string() + " holds only the matrices of --lora, and ";
  check_config(
      is_folder(folder), about, "there is no folder ", folder,
      " with the other weights; fsdp train --resume RUN --from FOLDER names another place");
  check_weight_files(folder);
  check_config(!weights.empty(), about, "lacks from.fingerprint, the hash of the other weights");
  check_config(
      weights_fingerprint(folder) == weights, about, "the weights in ", folder,
      " are not those that it was trained with; bring them back");
}

StateDict make_run_state_dict(Trainer& trainer, const RunState& run, const RunIdentity& identity) {
  auto state = trainer.state_dict();
  state.insert_all(get_random_state(), "random.");
  SavedRun saved{.identity = identity, .step = run.step, .ranks = get_world_size()};
  saved.mesh = identity.config.mesh.value_or(MeshShape{.shard = get_world_size()}).str();
  for_each_value(
      saved, [&](const std::string& key, const auto& value) { state.insert(key, value); });
  insert_losses(state, run);
  return state;
}

void load_run(const SavedRun& saved, Trainer& trainer, RunState& run) {
  auto state = trainer.state_dict();
  insert_losses(state, run);
  StateDict random;
  random.insert_all(get_random_state(), "random.");
  // Each rank has its own random state, so it only fits the same number of ranks.
  const bool same_ranks = saved.ranks == get_world_size();
  try {
    load(state, saved.path);
    if (same_ranks) {
      load(random, saved.path, {.strict = false}); // not strict: other devices have other keys
    }
  } catch (const CheckpointError& error) {
    throw_checkpoint_error(error.what_without_backtrace(), advice_instead_of(saved.path));
  }
  trainer.set_state_dict(state);
  if (same_ranks) {
    set_random_state(random.below("random."));
  }
  run.step = saved.step;
  run.first_loss = value_of<double>(state, "train.first_loss", saved.path);
}

SavedRun load_newest_good(SavedRun saved, Trainer& trainer, RunState& run) {
  // Every rank throws if any of them cannot load, so all take the same checkpoint in the end.
  while (true) {
    try {
      load_run(saved, trainer, run);
      return saved;
    } catch (const CheckpointError& error) {
      std::optional<std::filesystem::path> older;
      for (const auto& [step, path] : CheckpointSeries(saved.path.parent_path()).list()) {
        older = step < saved.step ? std::optional(path) : older;
      }
      if (!older) {
        throw;
      }
      if (get_rank() == 0) {
        std::cerr << "fsdp: warning: " << error.what_without_backtrace()
                  << "\nfsdp: warning: the run goes on from " << older->string() << " instead"
                  << std::endl;
      }
      saved = find_saved_run(older->string());
    }
  }
}

} // namespace fsdp::cli
