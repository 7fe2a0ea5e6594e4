// `fsdp train`: trains a small language model over several ranks.
#include <stdlib.h>

#include <ctime>
#include <memory>
#include <set>
#include <string>

#include <fsdp/checkpoint.h>
#include <fsdp/distributed.h>
#include <fsdp/launch.h>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/corpus.h"
#include "cli/progress.h"
#include "cli/run_checkpoint.h"
#include "cli/trainer.h"

namespace fsdp::cli {

namespace {

constexpr int kDefaultRanks = 4;
constexpr int64_t kSampleBytes = 240;

struct TrainOptions {
  RunIdentity identity;
  std::optional<int> ranks;
  std::string reshard = "auto";
  bool quiet = false;
  std::string run; // the folder; empty: one by date and time, if anything is saved
  std::string resume;
  int64_t save_every = 0; // 0: at the end alone
  CheckpointSeriesOptions keep;
  std::set<std::string> given; // by the command line

  bool saves() const {
    return !run.empty() || save_every > 0;
  }
};

/// This process as one rank of those that a launcher started.
struct Joined {
  Joined() {
    init_process_group({.backend = "gloo"});
  }
  ~Joined() {
    destroy_process_group();
  }
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;
};

std::string plural(int64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

void announce(
    Screen& screen, const TrainConfig& config, const Corpus& corpus, const Trainer& trainer) {
  const auto& dims = config.model;
  const auto whole_bytes = trainer.num_params() * static_cast<int64_t>(sizeof(float));
  screen.labelled(
      "model", c10::str(
                   decimal_count(trainer.num_params(), ""),
                   " parameters: ", plural(dims.layers, "layer"), " of ", dims.dim, ", ",
                   plural(dims.heads, "head"), ", ", dims.kv_heads, " for keys and values"));
  screen.labelled(
      "ranks",
      c10::str(
          get_world_size(), " over ", default_group().backend_name(), "; ",
          plural(trainer.num_groups(), "group"), ", ", binary_size(trainer.shard_bytes()), " of ",
          binary_size(whole_bytes), " of parameters on each rank, and three times that for ",
          "gradients and optimizer"));
  screen.labelled(
      "text", c10::str(
                  corpus.name(), ": ", plural(corpus.num_files(), "file"), ", ",
                  decimal_count(corpus.train_bytes(), "B"), " to train on and ",
                  decimal_count(corpus.held_out_bytes(), "B"), " held out"));
  screen.labelled(
      "run", c10::str(
                 plural(config.steps, "step"), " of ", config.batch, " x ", config.context, " = ",
                 config.batch * config.context, " tokens (bytes), seed ", config.seed));
}

/// runs/<date and time>, by the clock of rank 0. Collective.
std::string new_run_folder() {
  char text[16] = {};
  const auto now = std::time(nullptr);
  tm local{};
  std::strftime(text, sizeof(text), "%Y%m%d-%H%M%S", localtime_r(&now, &local));
  default_group().broadcast(torch::from_blob(text, {sizeof(text)}, torch::kByte), 0);
  return std::string("runs/") + text;
}

/// The checkpoints of a run, where it makes any. Its calls are collective.
class Saver {
 public:
  explicit Saver(const TrainOptions& options) : options_(options) {
    if (options.saves()) {
      run_ = options.run.empty() ? new_run_folder() : options.run;
      series_.emplace(checkpoints_of(run_), options.keep);
    }
  }

  /// After each update, beside the next ones.
  void after_step(Trainer& trainer, const RunState& run) {
    const auto every = options_.save_every;
    if (every > 0 && run.step % every == 0 && run.step < options_.identity.config.steps) {
      series_->async_save(run.step, make_run_state_dict(trainer, run, options_.identity));
    }
  }
  /// When the last one is done: it lies there when this returns.
  void at_end(Trainer& trainer, const RunState& run) {
    if (series_) {
      series_->save(run.step, make_run_state_dict(trainer, run, options_.identity));
    }
  }

  void tell(Screen& screen) const {
    if (series_) {
      screen.labelled(
          "saved", c10::str(
                       series_->latest().value().string(), "; to train on: fsdp train --resume ",
                       run_, " --steps ", 2 * options_.identity.config.steps));
    }
  }

 private:
  const TrainOptions& options_;
  std::string run_;
  std::optional<CheckpointSeries> series_;
};

/// The whole run, as one rank of it; rank 0 tells about it.
void train_rank(
    const TrainOptions& options, const Corpus& corpus, const std::optional<SavedRun>& saved) {
  const auto& config = options.identity.config;
  Saver saver(options);
  Trainer trainer(config, corpus);
  RunState run;
  if (saved) {
    load_run(*saved, trainer, run);
  }
  const bool tells = get_rank() == 0;
  const bool tells_all = tells && !options.quiet;
  Screen screen;
  if (tells_all) {
    announce(screen, config, corpus, trainer);
    if (saved) {
      screen.labelled(
          "resumed", c10::str(
                         saved->path.string(), ": ", plural(run.step, "step"), " done, by ",
                         plural(saved->ranks, "rank")));
    }
  }
  Progress progress(screen, config.steps, config.batch * config.context, run.step);
  while (run.step < config.steps) {
    const auto loss = trainer.step(run.step);
    run.add(loss);
    if (tells_all) {
      progress.update(run.step, loss);
    }
    saver.after_step(trainer, run);
  }
  const auto seconds = progress.seconds();
  saver.at_end(trainer, run);
  const auto validation_loss = trainer.validation_loss();
  if (tells) {
    screen.labelled(
        "result", c10::str(
                      "loss ", fixed(run.first_loss, 4), " -> ", fixed(run.mean_of_last(), 4),
                      " (last ", plural(run.num_last(), "step"), "), validation loss ",
                      fixed(validation_loss, 4), " (byte frequencies alone: ",
                      fixed(corpus.byte_frequency_loss(), 4), "), ", fixed(seconds, 1), " s"));
  }
  if (!options.quiet) { // generating is collective
    const auto prompt = corpus.prompt();
    const auto text = trainer.generate(prompt, kSampleBytes);
    if (tells) {
      screen.labelled("sample", "what the model makes of \"" + printable(prompt) + "\":");
      screen.line(printable(text));
    }
  }
  if (tells_all) {
    saver.tell(screen);
  }
}

/// Throws ConfigError that names the option and the way out.
void check_saving(const TrainOptions& options) {
  check_config(
      options.save_every >= 0, "--save-every ", options.save_every, ": it must be 0 or more");
  check_config(options.keep.keep >= 1, "--keep ", options.keep.keep, ": it must be 1 or more");
  check_config(
      options.keep.keep_every >= 0, "--keep-every ", options.keep.keep_every,
      ": it must be 0 or more");
  const bool goes_on = options.run == options.resume; // also when there is neither
  check_config(
      goes_on || options.run.empty() ||
          CheckpointSeries(checkpoints_of(options.run)).list().empty(),
      "--run ", options.run, " has checkpoints of an earlier run; go on with it by --resume ",
      options.run, ", or take another folder");
}

/// As the same file is called from any folder; as it is where there is none.
std::string absolute_path(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(
      realpath(path.c_str(), nullptr), &std::free);
  return real ? real.get() : path;
}

int train(TrainOptions options) {
  auto& identity = options.identity;
  auto& config = identity.config;
  check_saving(options);
  std::optional<SavedRun> saved;
  if (!options.resume.empty()) {
    saved = find_saved_run(options.resume);
    adopt_options(identity, *saved, options.given);
    if (saved->is_latest && options.run.empty()) {
      options.run = options.resume;
    }
  }
  const int ranks_alone =
      options.ranks.value_or(saved ? static_cast<int>(saved->ranks) : kDefaultRanks);
  config.model.kv_heads = config.model.heads % 2 == 0 ? config.model.heads / 2 : config.model.heads;
  config.model.hidden = default_hidden(config.model.dim);
  if (options.reshard != "auto") {
    config.reshard_after_forward = options.reshard == "true";
  }
  const bool launched = is_launched();
  // The launcher's number of ranks is known only after all have met.
  check(config, launched ? 1 : ranks_alone);
  const auto corpus =
      identity.data.empty() ? Corpus::libtorch_headers() : Corpus::read(identity.data);
  corpus.check_context(config.context);
  if (options.saves() || saved) {
    identity.data = identity.data.empty() ? "" : absolute_path(identity.data);
    identity.fingerprint = corpus.fingerprint();
  }
  if (saved) {
    check_text(identity, *saved);
  }
  if (launched) {
    const Joined joined;
    const int ranks = get_world_size();
    check_config(
        options.ranks.value_or(ranks) == ranks, "--ranks ", options.ranks.value_or(ranks),
        ": the launcher started ", ranks,
        "; leave --ranks out, or start fsdp train without a launcher");
    check(config, ranks);
    train_rank(options, corpus, saved);
  } else {
    run_ranks(ranks_alone, [&](int) { train_rank(options, corpus, saved); });
  }
  return 0;
}

} // namespace

void add_train(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("train", "Train a small language model over several ranks");
  // Given twice, the last one holds: scripts add to what they were given.
  command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  auto options = std::make_shared<TrainOptions>();
  auto& config = options->identity.config;
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->capture_default_str();
  };
  add("--steps", config.steps, "Updates");
  command->add_option(
      "--ranks", options->ranks,
      "Ranks, as threads [4]; a launcher (fsdp run, torchrun, srun, mpirun) decides itself");
  add("--seed", config.seed, "Decides weights, batches and sample");
  add("--batch", config.batch, "Rows of text per update, of all ranks together");
  add("--context", config.context, "Bytes per row");
  add("--dim", config.model.dim, "Width of the model");
  add("--layers", config.model.layers, "Blocks");
  add("--heads", config.model.heads, "Attention heads; half as many for keys and values");
  add("--lr", config.lr, "Highest learning rate");
  command->add_option(
      "--data", options->identity.data, "File or folder of text [LibTorch's C++ headers]");
  add("--reshard-after-forward", options->reshard,
      "Free the parameters after forward, and gather them again for backward")
      ->check(CLI::IsMember({"auto", "true", "false"}));
  command->add_flag("--quiet", options->quiet, "Print the result only");
  const auto add_saving = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->group("Checkpoints");
  };
  add_saving(
      "--run", options->run,
      "Save below this folder, at the end at least [runs/<date and time>, with --save-every]");
  add_saving("--save-every", options->save_every, "Save each time after so many updates");
  add_saving("--keep", options->keep.keep, "Checkpoints that stay: the newest so many")
      ->capture_default_str();
  add_saving("--keep-every", options->keep.keep_every, "And those of multiples of this step");
  add_saving(
      "--resume", options->resume,
      "Go on with the newest checkpoint of a run's folder, or from a given one, also with other "
      "--ranks; options that are not given are as they were");
  command->callback([command, options, &action] {
    for (const auto* option : command->get_options()) {
      if (option->count() > 0) {
        options->given.insert(option->get_single_name());
      }
    }
    action = [options] { return train(*options); };
  });
}

} // namespace fsdp::cli
