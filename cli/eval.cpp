// `fsdp eval`: how well a trained model predicts a text.
#include <fsdp/distributed.h>
#include <fsdp/launch.h>
#include <fsdp/meta_init.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/generate/language_model.h"
#include "cli/scoped_process_group.h"
#include "cli/text/documents.h"
#include "cli/train/corpus.h"
#include "cli/train/loss.h"
#include "cli/train/progress.h"
#include "cli/train/trainer.h"

namespace fsdp::cli {

namespace {

struct EvalOptions {
  std::string checkpoint;
  std::string data;
  std::string tokenizer;
  std::string field = "text";
  std::string mesh;
  std::optional<int64_t> ranks;
  std::optional<int64_t> context;
  std::string token_dtype = "auto";
  std::string document_end = "none";
  int64_t batch = 4; // rows of each rank at once
  std::string dtype = "fp32";
  std::string device = "cpu";
  bool json = false;
};

/// Sums over all tokens that were predicted.
struct Sums {
  double loss = 0; // in nats
  int64_t tokens = 0;
  int64_t bytes = 0; // of text; special tokens have none
};

/// Reads the text as the model knows it.
Corpus read_corpus(const EvalOptions& options, const LanguageModel& language) {
  TokensOf tokens{
      .vocab = language.dims.vocab,
      .raw = raw_type(options.token_dtype),
      .context = *options.context};
  if (language.tokenizer && Corpus::is_text(options.data)) {
    tokens.tokenizer = language.tokenizer;
    tokens.documents = {.about = "--data: ", .field = options.field, .end = language.end};
  }
  auto corpus = Corpus::read(options.data, tokens);
  check_config(
      !corpus.is_bytes() || tokens.vocab == 256 ||
          (options.tokenizer == "bytes" && tokens.vocab > 256),
      "--data: the model has ", tokens.vocab,
      " tokens, and no tokenizer is known that makes them from text; --tokenizer names a folder "
      "with one, or bytes");
  if (options.document_end != "none") {
    const auto folder = language.tokenizer ? language.tokenizer->folder() : "";
    corpus.separate_documents(options.document_end, folder, language.dims.vocab);
  }
  return corpus;
}

/// The bytes of each token. 0 if that is not known.
torch::Tensor token_sizes(const LanguageModel& language, const Corpus& corpus) {
  auto sizes = torch::full({language.dims.vocab}, corpus.is_bytes() ? 1 : 0, torch::kLong);
  auto* const values = sizes.data_ptr<int64_t>();
  if (corpus.is_bytes() || !language.tokenizer) {
    return sizes;
  }
  for (int64_t token = 0; token < language.dims.vocab; ++token) {
    if (language.tokenizer->has(token) && !language.tokenizer->is_special(token)) {
      values[token] = std::ssize(language.tokenizer->bytes_of(token));
    }
  }
  return sizes;
}

/// Goes through the rows of one rank. Returns the sums over all ranks. Collective.
Sums evaluate_rank(
    const EvalOptions& options, const LanguageModel& language, const Corpus& corpus) {
  const torch::NoGradGuard no_grad;
  const auto device = pick_device(options.device);
  TrainConfig config;
  config.model = language.dims;
  config.from = language.folder;
  config.param_dtype = options.dtype;
  config.mesh = parse_mesh(options.mesh, get_world_size());
  config.batch = options.batch * config.mesh->data_ranks();
  check(config, *config.mesh); // that tp divides the model
  const TrainMesh mesh(*config.mesh, device.type());
  auto model = build_sharded(config, mesh);
  to_empty(model, device);
  language.load(model);

  const auto sizes = token_sizes(language, corpus);
  const auto context = *options.context;
  const auto num_rows = corpus.num_rows(context);
  const auto at_once = options.batch * mesh.shape.data_ranks();
  Sums mine;
  for (int64_t first = 0; first < num_rows; first += at_once) {
    // Every rank takes part in each round. Beyond the last row there is only padding.
    const auto rows =
        corpus.rows_of_all(first + mesh.data_rank * options.batch, options.batch, context);
    mine.loss += loss_sum(model, rows.to(device), /*have_flags=*/true).item<double>();
    const auto targets = rows.narrow(1, 1, context);
    const auto predicted = targets.masked_select(targets.bitwise_and(kIsGiven).eq(0));
    mine.tokens += predicted.numel();
    mine.bytes += sizes.take(predicted.bitwise_and(kTokenNumber)).sum().item<int64_t>();
  }
  const auto sums =
      torch::tensor(
          {mine.loss, static_cast<double>(mine.tokens), static_cast<double>(mine.bytes)},
          torch::kDouble)
          .to(device);
  default_group().all_reduce(sums, ReduceOp::Sum);
  const auto all = sums.to(torch::kCPU) / mesh.shape.tensor; // its ranks have the same rows
  return {
      all[0].item<double>(), std::llround(all[1].item<double>()),
      std::llround(all[2].item<double>())};
}

void print(const EvalOptions& options, const Sums& sums, double seconds) {
  const auto loss = sums.loss / static_cast<double>(sums.tokens);
  const bool has_bytes = sums.bytes > 0;
  const auto bits = has_bytes ? sums.loss / std::log(2.0) / static_cast<double>(sums.bytes) : 0.0;
  if (options.json) {
    nlohmann::ordered_json json{
        {"loss", loss}, {"perplexity", std::exp(loss)}, {"tokens", sums.tokens}};
    if (has_bytes) {
      json["bytes"] = sums.bytes;
      json["bits_per_byte"] = bits;
    }
    json["seconds"] = seconds;
    std::cout << json.dump() << std::endl;
    return;
  }
  Screen screen;
  screen.labelled(
      "result", c10::str(
                    "loss ", fixed(loss, 4), ", perplexity ", fixed(std::exp(loss), 2),
                    has_bytes ? ", " + fixed(bits, 4) + " bits per byte" : "", " over ",
                    plural(sums.tokens, "token"), ", ", fixed(seconds, 1), " s"));
}

int evaluate(EvalOptions& options) {
  const auto language = find_language_model(
      options.checkpoint, options.tokenizer, /*needed=*/Corpus::is_text(options.data));
  constexpr int64_t kUsualContext = 1024;
  const auto longest = language.longest;
  if (!options.context) {
    options.context = std::min(longest, kUsualContext);
  }
  check_config(
      *options.context >= 1 && *options.context <= longest, "--context ", *options.context,
      ": the model takes between 1 and ", longest, " tokens");
  check_at_least("--batch", options.batch, 1);
  check_at_least("--ranks", options.ranks.value_or(1), 1);
  check_config(
      options.device == "cpu" || torch::cuda::device_count() > 0,
      "--device cuda: there is no such device here; see fsdp doctor");
  const auto corpus = read_corpus(options, language);
  check_config(corpus.num_rows(*options.context) > 0, "--data: ", options.data, " is too short");
  const auto start = std::chrono::steady_clock::now();
  if (is_launched()) {
    check_config(!options.ranks, "--ranks: the launcher has started the ranks; leave it out");
    const ScopedProcessGroup joined({.backend = options.device == "cpu" ? "gloo" : ""});
    const auto sums = evaluate_rank(options, language, corpus);
    if (get_rank() == 0) {
      print(options, sums, seconds_since(start));
    }
    return 0;
  }
  Sums sums;
  const bool alone = options.mesh.empty() && !options.ranks;
  const auto ranks =
      parse_mesh(options.mesh, alone ? std::optional<int64_t>(1) : options.ranks).ranks();
  run_ranks(static_cast<int>(ranks), [&](int rank) {
    const auto all = evaluate_rank(options, language, corpus);
    if (rank == 0) {
      sums = all;
    }
  });
  print(options, sums, seconds_since(start));
  return 0;
}

} // namespace

void add_eval(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("eval", "Measure how well a trained model predicts a text");
  command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  auto options = std::make_shared<EvalOptions>();
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->capture_default_str();
  };
  command
      ->add_option(
          "--checkpoint", options->checkpoint,
          "A run's folder (its newest checkpoint is used), a checkpoint, or a Hugging Face folder")
      ->required();
  command
      ->add_option(
          "--data", options->data, "Text, examples or files of tokens; see fsdp train --data")
      ->required();
  command->add_option(
      "--tokenizer", options->tokenizer,
      "A folder with a tokenizer.json, or bytes [that of the model]");
  add("--field", options->field, "The field of a .jsonl line that holds the text");
  command->add_option(
      "--context", options->context, "Tokens per row [what the model takes, 1024 at most]");
  add("--token-dtype", options->token_dtype,
      "What a .bin file without a header holds: uint16, uint32 or auto; see fsdp train")
      ->check(CLI::IsMember({"auto", "uint16", "uint32"}));
  add("--document-end", options->document_end,
      "Attention does not cross this token: a number, or eos; see fsdp train");
  add("--batch", options->batch, "Rows of each rank at once");
  command->add_option("--ranks", options->ranks, "Ranks as threads [1, or those of --mesh]");
  command->add_option("--mesh", options->mesh, "Sizes of the axes, e.g. dp=2,shard=2,tp=2");
  add("--dtype", options->dtype, "Compute in fp32 or bf16")->check(CLI::IsMember({"bf16", "fp32"}));
  add("--device", options->device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  command->add_flag("--json", options->json, "Print a JSON object");
  command->callback([options, &action] { action = [options] { return evaluate(*options); }; });
}

} // namespace fsdp::cli
