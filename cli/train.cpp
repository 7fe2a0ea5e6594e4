// `fsdp train`: trains a small language model over several ranks.
#include <deque>
#include <memory>
#include <numeric>
#include <string>

#include <fsdp/distributed.h>
#include <fsdp/launch.h>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/corpus.h"
#include "cli/progress.h"
#include "cli/trainer.h"

namespace fsdp::cli {

namespace {

constexpr int kDefaultRanks = 4;
constexpr int64_t kSampleBytes = 240;
constexpr size_t kLastSteps = 10; // whose mean is the final training loss

struct TrainOptions {
  TrainConfig config;
  std::optional<int> ranks;
  std::string data; // empty: LibTorch's headers
  std::string reshard = "auto";
  bool quiet = false;
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

/// The whole run, as one rank of it; rank 0 tells about it.
void train_rank(const TrainOptions& options, const Corpus& corpus) {
  const auto& config = options.config;
  Trainer trainer(config, corpus);
  const bool tells = get_rank() == 0;
  const bool tells_all = tells && !options.quiet;
  Screen screen;
  if (tells_all) {
    announce(screen, config, corpus, trainer);
  }
  Progress progress(screen, config.steps, config.batch * config.context);
  double first_loss = 0;
  std::deque<double> last_losses;
  for (int64_t step = 0; step < config.steps; ++step) {
    const auto loss = trainer.step(step);
    first_loss = step == 0 ? loss : first_loss;
    last_losses.push_back(loss);
    if (last_losses.size() > kLastSteps) {
      last_losses.pop_front();
    }
    if (tells_all) {
      progress.update(step + 1, loss);
    }
  }
  const auto seconds = progress.seconds();
  const auto validation_loss = trainer.validation_loss();
  if (tells) {
    const auto mean = std::accumulate(last_losses.begin(), last_losses.end(), 0.0) /
                      static_cast<double>(last_losses.size());
    screen.labelled(
        "result", c10::str(
                      "loss ", fixed(first_loss, 4), " -> ", fixed(mean, 4), " (last ",
                      plural(static_cast<int64_t>(last_losses.size()), "step"),
                      "), validation loss ", fixed(validation_loss, 4),
                      " (byte frequencies alone: ", fixed(corpus.byte_frequency_loss(), 4), "), ",
                      fixed(seconds, 1), " s"));
  }
  if (!options.quiet) { // generating is collective
    const auto prompt = corpus.prompt();
    const auto text = trainer.generate(prompt, kSampleBytes);
    if (tells) {
      screen.labelled("sample", "what the model makes of \"" + printable(prompt) + "\":");
      screen.line(printable(text));
    }
  }
}

int train(TrainOptions options) {
  auto& config = options.config;
  config.model.kv_heads = config.model.heads % 2 == 0 ? config.model.heads / 2 : config.model.heads;
  config.model.hidden = default_hidden(config.model.dim);
  if (options.reshard != "auto") {
    config.reshard_after_forward = options.reshard == "true";
  }
  const bool launched = is_launched();
  // The launcher's number of ranks is known only after all have met.
  check(config, launched ? 1 : options.ranks.value_or(kDefaultRanks));
  const auto corpus =
      options.data.empty() ? Corpus::libtorch_headers() : Corpus::read(options.data);
  corpus.check_context(config.context);
  if (launched) {
    const Joined joined;
    const int ranks = get_world_size();
    check_config(
        options.ranks.value_or(ranks) == ranks, "--ranks ", options.ranks.value_or(ranks),
        ": the launcher started ", ranks,
        "; leave --ranks out, or start fsdp train without a launcher");
    check(config, ranks);
    train_rank(options, corpus);
  } else {
    run_ranks(options.ranks.value_or(kDefaultRanks), [&](int) { train_rank(options, corpus); });
  }
  return 0;
}

} // namespace

void add_train(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("train", "Train a small language model over several ranks");
  // Given twice, the last one holds: scripts add to what they were given.
  command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  auto options = std::make_shared<TrainOptions>();
  auto& config = options->config;
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
  command->add_option("--data", options->data, "File or folder of text [LibTorch's C++ headers]");
  add("--reshard-after-forward", options->reshard,
      "Free the parameters after forward, and gather them again for backward")
      ->check(CLI::IsMember({"auto", "true", "false"}));
  command->add_flag("--quiet", options->quiet, "Print the result only");
  command->callback([options, &action] { action = [options] { return train(*options); }; });
}

} // namespace fsdp::cli
