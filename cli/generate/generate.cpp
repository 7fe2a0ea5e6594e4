// `fsdp generate`: generates text with a run of `fsdp train`, or with a Hugging Face folder.
#include <chrono>
#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/distributed.h>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/config/train_config.h"
#include "cli/generate/decoder.h"
#include "cli/generate/language_model.h"
#include "cli/generate/text_stream.h"
#include "cli/text/token_text.h"
#include "cli/train/progress.h"
#include "cli/train/token_choice.h"

namespace fsdp::cli {

namespace {

constexpr auto kInfinity = std::numeric_limits<double>::infinity();

struct GenerateOptions {
  std::string checkpoint;
  std::string tokenizer;
  std::string prompt;
  int64_t tokens = 200;
  TokenChoice::Options choice;
  int64_t seed = 1;
  std::vector<std::string> stops;
  std::string dtype = "fp32";
  bool raw = false;
  bool stats = false;
};

void check(const GenerateOptions& options) {
  check_at_least("--tokens", options.tokens, 1);
  const auto temperature = options.choice.temperature;
  check_config(
      temperature >= 0 && std::isfinite(temperature), "--temperature ", temperature,
      ": it must be 0 (the likeliest token each time) or more, and finite");
  const auto top_p = options.choice.top_p;
  check_config(top_p > 0 && top_p <= 1, "--top-p ", top_p, ": it must be above 0, and at most 1");
  check_at_least("--seed", options.seed, 0);
  for (const auto& stop : options.stops) {
    check_config(!stop.empty(), "--stop: an empty text would stop at once");
  }
}

/// Draws tokens until there are `count`, one ends the text, or `on_token` returns false. Returns
/// how many were drawn.
template <class OnToken>
int64_t draw(
    const LanguageModel& language,
    const Transformer& model,
    std::vector<int64_t> tokens,
    int64_t count,
    TokenChoice choose,
    const OnToken& on_token) {
  const auto most =
      std::min(language.longest, std::ssize(tokens) + std::min(count, language.longest));
  const auto meaningless = language.meaningless();
  Decoder decoder(model, most);
  // The tokens that the decoder has not seen.
  auto next = std::vector(tokens.end() - std::min(most, std::ssize(tokens)), tokens.end());
  for (int64_t drawn = 0; drawn < count; ++drawn) {
    if (decoder.length() + std::ssize(next) > most) {
      // There is no more room. It forgets the earlier half, so that this happens rarely.
      decoder.clear();
      next.assign(tokens.end() - (most + 1) / 2, tokens.end());
    }
    const auto token = choose(decoder.scores_behind(next).masked_fill(meaningless, -kInfinity));
    if (language.ends.contains(token) || !on_token(token)) {
      return drawn + 1;
    }
    tokens.push_back(token);
    next.assign({token});
  }
  return count;
}

void print(const std::string& text) {
  std::cout << text << std::flush;
  TORCH_CHECK(std::cout, "cannot write to standard output"); // the reader may have gone
}

std::vector<int64_t> prompt_tokens(const LanguageModel& language, const std::string& prompt) {
  try {
    auto tokens = language.encode(prompt);
    if (tokens.empty()) { // the model needs at least one
      tokens = language.encode("\n");
    }
    if (std::ssize(tokens) > language.longest) {
      std::cerr << "fsdp: warning: the prompt has " << tokens.size()
                << " tokens, and the model sees only the last " << language.longest << std::endl;
    }
    return tokens;
  } catch (const ConfigError& error) {
    throw_config_error("--prompt: ", error.what_without_backtrace());
  }
}

int generate(const GenerateOptions& options) {
  check(options);
  auto choice = options.choice;
  choice.seed = static_cast<uint64_t>(options.seed);
  const auto language = find_language_model(options.checkpoint, options.tokenizer);
  const auto tokens = prompt_tokens(language, options.prompt);
  run_ranks(1, [&](int) {
    const auto model = load_whole(language, dtype_of(options.dtype));
    print(options.raw ? options.prompt : shown_text(options.prompt));
    TextStream stream(options.stops, [&](const std::string& text) {
      print(options.raw ? text : shown_text(text));
    });
    std::optional<TokenText> text;
    if (language.tokenizer) {
      text.emplace(*language.tokenizer, /*begins=*/options.prompt.empty());
    }
    const auto start = std::chrono::steady_clock::now();
    const auto drawn =
        draw(language, model, tokens, options.tokens, TokenChoice(choice), [&](int64_t token) {
          return stream.add(text ? text->add(token) : language.bytes_of(token));
        });
    if (!text || stream.add(text->finish())) {
      stream.finish();
    }
    const auto seconds = seconds_since(start);
    std::cout << std::endl;
    if (options.stats) {
      std::cerr << "fsdp: " << plural(std::ssize(tokens), "token") << " of the prompt and "
                << plural(drawn, "new one") << " in " << fixed(seconds, 2) << " s, "
                << fixed(static_cast<double>(drawn) / seconds, 1) << " per second" << std::endl;
    }
  });
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
          "A run's folder (its newest checkpoint is used), a checkpoint, or a Hugging Face folder")
      ->required();
  command->add_option(
      "--tokenizer", options->tokenizer,
      "A folder with a tokenizer.json, or bytes [that of the model]");
  command->add_option("--prompt", options->prompt, "Text to continue");
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->capture_default_str();
  };
  add("--tokens", options->tokens, "The most tokens to generate");
  add("--temperature", options->choice.temperature,
      "0: always the likeliest token; 1: the learned probabilities");
  add("--top-p", options->choice.top_p,
      "Draw only from the likeliest tokens that together have this probability");
  add("--seed", options->seed, "Seed of the random choices");
  command->add_option("--stop", options->stops, "Stop before this text; may be given several times")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->expected(1);
  add("--dtype", options->dtype, "Compute in fp32 or bf16")->check(CLI::IsMember({"bf16", "fp32"}));
  command->add_flag(
      "--raw", options->raw,
      "Print all bytes unchanged; otherwise ? replaces characters that control a terminal");
  command->add_flag("--stats", options->stats, "Print on stderr how long it took");
  command->callback([options, &action] { action = [options] { return generate(*options); }; });
}

} // namespace fsdp::cli
