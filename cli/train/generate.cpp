// `fsdp generate`: generates text with a checkpoint of `fsdp train`.
#include <cmath>
#include <iostream>
#include <memory>
#include <string>

#include <fsdp/checkpoint.h>
#include <fsdp/distributed.h>
#include <fsdp/meta_init.h>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/train/progress.h"
#include "cli/train/run_checkpoint.h"
#include "cli/train/sampler.h"

namespace fsdp::cli {

namespace {

struct GenerateOptions {
  std::string checkpoint;
  std::string prompt;
  int64_t tokens = 200;
  double temperature = 0.8;
  int64_t seed = 1;
  bool raw = false;
};

void check(const GenerateOptions& options) {
  check_config(options.tokens >= 1, "--tokens ", options.tokens, ": it must be 1 or more");
  check_config(
      options.temperature >= 0 && std::isfinite(options.temperature), "--temperature ",
      options.temperature, ": it must be 0 (the likeliest byte each time) or more, and finite");
  check_config(options.seed >= 0, "--seed ", options.seed, ": it must be 0 or more");
}

/// Loads only the weights, into an unsharded model.
Transformer load_model(const SavedRun& saved) {
  Transformer model{nullptr};
  {
    const MetaInit on_meta;
    model = Transformer(saved.identity.config.model);
  }
  to_empty(model, torch::kCPU);
  StateDict state;
  state.insert_all(get_model_state_dict(model), "model.");
  load(state, saved.path);
  return model;
}

int generate(const GenerateOptions& options) {
  check(options);
  const auto saved = find_saved_run(options.checkpoint, "--checkpoint", /*model_only=*/true);
  warn_of_skipped(saved);
  run_ranks(1, [&](int) {
    auto model = load_model(saved);
    sample(
        model, options.prompt,
        {.count = options.tokens,
         .temperature = options.temperature,
         .seed = static_cast<uint64_t>(options.seed),
         .context = saved.identity.config.context,
         .on_text = [&](const std::string& text) {
           std::cout << (options.raw ? text : printable(text)) << std::flush;
           TORCH_CHECK(std::cout, "cannot write to standard output"); // the reader may have gone
         }});
  });
  std::cout << std::endl;
  return 0;
}

} // namespace

void add_generate(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("generate", "Generate text with a trained model");
  command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  auto options = std::make_shared<GenerateOptions>();
  command
      ->add_option(
          "--checkpoint", options->checkpoint,
          "A run's folder (its newest checkpoint is used), or a checkpoint")
      ->required();
  command->add_option("--prompt", options->prompt, "Text to continue");
  const auto add = [&](const char* name, auto& value, const char* help) {
    command->add_option(name, value, help)->capture_default_str();
  };
  add("--tokens", options->tokens, "Number of bytes to generate");
  add("--temperature", options->temperature,
      "0: always the likeliest byte; 1: the learned probabilities");
  add("--seed", options->seed, "Seed of the random choices");
  command->add_flag("--raw", options->raw, "Print all bytes unchanged, not ? for unprintable ones");
  command->callback([options, &action] { action = [options] { return generate(*options); }; });
}

} // namespace fsdp::cli
