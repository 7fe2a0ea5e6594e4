// `fsdp train`: trains a language model over several ranks.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/distributed.h>
#include <fsdp/launch.h>
#include <fsdp/trace.h>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/files.h"
#include "cli/invocation.h"
#include "cli/report/report.h"
#include "cli/scoped_process_group.h"
#include "cli/train/corpus.h"
#include "cli/train/fit.h"
#include "cli/train/flops.h"
#include "cli/train/narrator.h"
#include "cli/train/options.h"
#include "cli/train/plan.h"
#include "cli/train/pretrained.h"
#include "cli/train/progress.h"
#include "cli/train/run_checkpoint.h"
#include "cli/train/run_folder.h"
#include "cli/train/signals.h"
#include "cli/train/trainer.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kSampleBytes = 240;

StepRecord make_record(
    const StepResult& result,
    int64_t done,
    double seconds,
    double exposed_s,
    const TrainConfig& config,
    std::optional<double> peak) {
  const auto tokens = config.batch * config.context;
  const auto ranks = static_cast<double>(config.mesh->ranks());
  const auto flops =
      flops_per_token(config.model, config.context) * static_cast<double>(tokens) / seconds / ranks;
  return {
      .step = done,
      .result = result,
      .tokens = done * tokens,
      .seconds = seconds,
      .tokens_per_s = static_cast<double>(tokens) / seconds,
      .exposed_s = exposed_s,
      .flops_per_s = flops,
      .utilisation = peak ? std::optional(flops / *peak) : std::nullopt};
}

/// The most operations per second of a rank, whose device others may share, if it is known.
std::optional<double> peak_of(const TrainOptions& options) {
  const auto& config = options.identity.config;
  auto peak = std::optional<double>();
  if (options.peak_tflops > 0) {
    peak = 1e12 * options.peak_tflops;
  } else if (config.device != "cpu") {
    peak = peak_flops(gpu_name(), config.param_dtype);
  }
  if (peak) {
    const auto here = is_launched() ? local_rank().num_ranks : config.mesh->ranks();
    *peak /= static_cast<double>(ranks_per_device(config.device, here));
  }
  return peak;
}

Validation validate(Trainer& trainer, int64_t step) {
  return {
      .step = step,
      .loss = trainer.validation_loss(),
      .byte_frequency_loss = trainer.corpus().frequency_loss()};
}

/// Trains until the run is done, or until the ranks agree to stop because of a signal.
void train_steps(
    const TrainOptions& options,
    Trainer& trainer,
    RunState& run,
    RunFolder& folder,
    Narrator& narrator,
    std::vector<double>& losses) {
  const auto& config = options.identity.config;
  const auto peak = peak_of(options);
  WaitTimer waited;
  double longest = 0;
  while (run.step < config.steps && trainer.stop() == 0) {
    folder.before_step(run.step);
    const auto start = std::chrono::steady_clock::now();
    waited.reset();
    const auto result = trainer.step(run.step);
    run.add(result.loss);
    losses.push_back(result.loss);
    const auto seconds = seconds_since(start);
    longest = std::max(longest, seconds);
    StopSignals::expect_within(2 * longest);
    const auto record = make_record(result, run.step, seconds, waited.seconds(), config, peak);
    folder.add(record);
    narrator.step(record);
    if (trainer.stop() != 0) {
      return;
    }
    folder.after_step(trainer, run);
    const auto every = options.validate_every;
    if (every > 0 && run.step % every == 0 && run.step < config.steps) {
      const auto validation = validate(trainer, run.step);
      if (trainer.stop() == 0) {
        folder.add(validation);
        narrator.validation(validation);
      }
    }
  }
}

/// Validates the model that was trained, and shows it. A signal ends this early.
void show_result(
    Trainer& trainer,
    const RunState& run,
    RunFolder& folder,
    Narrator& narrator,
    const std::vector<double>& losses,
    double seconds) {
  const auto validation = validate(trainer, run.step);
  if (trainer.stop() != 0) {
    return;
  }
  folder.add(validation);
  narrator.curve(losses);
  narrator.result(
      {.first_loss = run.first_loss,
       .last_loss = run.mean_of_last(),
       .num_last = run.num_last(),
       .validation = validation,
       .seconds = seconds});
  if (narrator.wants_sample() && trainer.corpus().is_bytes()) { // generating is collective
    const auto prompt = trainer.corpus().prompt();
    const auto text = trainer.generate(prompt, kSampleBytes);
    if (trainer.stop() == 0) {
      narrator.sample(prompt, text);
    }
  }
}

/// Whether the run reads the weights of --from. A checkpoint has all weights, unless it is of LoRA.
bool needs_pretrained(const TrainConfig& config, const std::optional<SavedRun>& saved) {
  return !config.from.empty() && (config.has_lora() || !(saved && saved->has_checkpoint));
}

/// Runs one rank from the beginning to the end, and returns the exit code. Rank 0 reports the run.
int train_rank(
    const TrainOptions& options,
    const Fit& fit,
    const Corpus& corpus,
    const std::optional<SavedRun>& saved) {
  const auto& config = options.identity.config;
  Trainer trainer(config, corpus, StopSignals::asked);
  RunFolder folder(options);
  RunState run;
  auto loaded = saved;
  if (needs_pretrained(config, saved)) {
    trainer.load_pretrained(config.from);
  }
  if (saved && saved->has_checkpoint && options.go_on) {
    loaded = load_newest_good(*saved, trainer, run);
  } else if (saved && saved->has_checkpoint) {
    load_run(*saved, trainer, run);
  }
  const auto plan = make_plan(
      config, *config.mesh, {.saves = options.saves_on_the_way(), .documents = corpus.has_flags()});
  StopSignals::expect_within(0); // from here on, no rank may end alone at once
  folder.begin(plan, trainer.device(), run.step);
  Narrator narrator(options, /*prints=*/get_rank() == 0);
  narrator.plan(plan, fit, trainer.shard_bytes(), default_group().backend_name());
  narrator.text(corpus);
  if (loaded) {
    if (get_rank() == 0) {
      warn_of_skipped(*saved);
    }
    narrator.resumed(*loaded, folder.lost());
  }
  narrator.begin(run.step);
  auto losses = folder.earlier_losses();
  try {
    train_steps(options, trainer, run, folder, narrator, losses);
  } catch (const NonFiniteError& error) {
    // Every rank stops at the same step, so none waits in a collective.
    folder.report();
    if (get_rank() == 0) {
      const auto latest = folder.latest();
      std::cerr << "\nfsdp: " << error.what_without_backtrace()
                << (latest.empty() ? "" : "; the newest checkpoint is " + latest) << std::endl;
    }
    return kNonFinite;
  }
  const auto seconds = narrator.seconds();
  folder.at_end(trainer, run);
  if (trainer.stop() == 0) { // else the user wants the run to end
    show_result(trainer, run, folder, narrator, losses, seconds);
  }
  if (trainer.stop() != 0) {
    narrator.stopped(trainer.stop() == SIGINT ? "SIGINT" : "SIGTERM", run.step);
  }
  folder.report();
  if (folder.exists()) {
    narrator.saved(folder.path(), folder.latest(), run.step);
  }
  return trainer.stop() == 0 ? 0 : 128 + trainer.stop();
}

/// Throws ConfigError if bytes are the tokens, and the model lacks some of them.
void check_vocab(const RunIdentity& identity) {
  const auto vocab = identity.config.model.vocab;
  check_config(
      vocab >= 256 || !identity.config.from.empty() || !Corpus::is_text(identity.data), "--vocab ",
      vocab, ": each of the 256 bytes of a text is a token; use 256 or more, or give files of ",
      "tokens with --data");
}

/// Reads --data, or the default text.
Corpus read_corpus(const TrainOptions& options) {
  const auto& [config, data, fingerprint, weights] = options.identity;
  TokensOf tokens{
      .vocab = config.model.vocab, .raw = raw_type(options.token_dtype), .context = config.context};
  if (Corpus::is_text(data) && !config.from.empty() && Tokenizer::is_in(config.from)) {
    tokens.tokenizer = Tokenizer::read(config.from);
    tokens.documents = {.about = "--data: ", .end = end_token(*tokens.tokenizer, config.from)};
    tokens.needs_end = true;
  }
  auto corpus = data.empty() ? Corpus::libtorch_headers(tokens) : Corpus::read(data, tokens);
  check_config(
      !corpus.is_bytes() || config.from.empty() || tokens.vocab == 256, "--from ", config.from,
      " has no tokenizer.json, so a text cannot become the model's tokens; give files of tokens "
      "with --data");
  if (config.document_end != "none") {
    corpus.separate_documents(config.document_end, config.from, config.model.vocab);
  }
  return corpus;
}

/// Prints the plan of a run. Builds the model on the meta device, as rank 0 of a fake world.
int dry_run(TrainOptions& options) {
  const auto mesh = resolve_mesh(options, std::nullopt, std::nullopt);
  auto& config = options.identity.config;
  std::optional<Corpus> corpus; // not the default text: it takes a while to read
  if (!options.identity.data.empty()) {
    corpus = read_corpus(options);
    corpus->check_context(config.context);
  }
  const ScopedProcessGroup joined(
      {.backend = "fake", .rank = 0, .world_size = static_cast<int>(mesh.ranks())});
  const auto model = build_sharded(config, TrainMesh(mesh, c10::kCPU));
  options.quiet = false; // the plan is the result
  Narrator narrator(options, /*prints=*/true);
  const PlanFor what{
      .saves = options.saves_on_the_way(), .documents = corpus && corpus->has_flags()};
  const auto fit = judge(config, mesh, what, find_room(config.device, mesh.ranks()));
  narrator.plan(make_plan(config, mesh, what), fit, shard_bytes(model), "no network");
  if (corpus) {
    narrator.text(*corpus);
  }
  return 0;
}

/// The settings that must be equal on all ranks of a launched run, by the names of the options.
std::map<std::string, std::string> shared_settings(
    const TrainOptions& options, const Corpus& corpus, const std::optional<SavedRun>& saved) {
  auto json = config_json(options);
  json.erase("data"); // paths may differ between machines, what is there may not
  json.erase("from");
  json["mesh"] = options.mesh; // as given: how many ranks there are is not known yet
  json["run"] = options.run;
  json["no-save"] = options.no_save;
  std::map<std::string, std::string> settings;
  for (const auto& [name, value] : json.items()) {
    settings["--" + name] = value.dump();
  }
  settings["the text of --data"] = c10::str(
      corpus.num_train() + corpus.num_held_out(), " ", corpus.unit(), " with the hash ",
      corpus.fingerprint());
  const auto& from = options.identity.config.from;
  settings["the weights of --from"] =
      needs_pretrained(options.identity.config, saved) ? weights_fingerprint(from) : "none";
  settings["the checkpoint to resume from"] =
      saved && saved->has_checkpoint ? saved->path.filename().string() : "none";
  return settings;
}

/// Replaces this process by `fsdp run`, which starts the same command once per rank.
[[noreturn]] void become_launcher(const TrainOptions& options) {
  std::vector<std::string> words{
      "run", "-n", std::to_string(options.identity.config.mesh->ranks()), "--bare"};
  if (options.restarts > 0) {
    words.insert(words.end(), {"--restarts", std::to_string(options.restarts)});
  }
  if (options.min_ranks > 0) {
    words.insert(words.end(), {"--min-ranks", std::to_string(options.min_ranks)});
  }
  words.insert(words.end(), {"--", real_path("/proc/self/exe")});
  const auto own = own_arguments();
  words.insert(words.end(), own.begin(), own.end());
  replace_process(words);
}

/// Returns the absolute path. `path` may be a pattern of names.
std::string absolute_path(const std::string& path) {
  const auto real = real_path(path);
  return real.starts_with("/") ? real : real_path(".") + "/" + real;
}

/// If the job has been started again, or with --go-on: continues the run in the folder of --run, if
/// there is one, with all ranks that are there.
void resolve_restart(TrainOptions& options) {
  const char* text = std::getenv("TORCHELASTIC_MAX_RESTARTS");
  const bool may_restart = options.restarts > 0 || num_restarts() > 0 || (text && std::atoi(text));
  check_config(
      !(may_restart || options.go_on) || !options.run.empty() || !options.resume.empty() ||
          options.no_save,
      options.go_on ? "--go-on" : "a job that may start again",
      " needs a folder that it finds again; give --run FOLDER");
  if (num_restarts() > 0) {
    options.go_on = true;
    options.ranks.reset(); // there may be fewer now
    options.force = true;  // what the lost ranks held may not be free yet
  }
  if (options.go_on && options.resume.empty() && is_file(options.run + "/" + kConfigFile)) {
    const auto before = read_config_json(options.run);
    auto& from = options.identity.config.from;
    check_config(
        from.empty() || !before || real_path(from) == before->identity.config.from, "--from ", from,
        ": the run in ", options.run, " did not begin with it; leave it out, or use another --run");
    options.resume = options.run;
    options.given.erase("model"); // the run has its sizes
    options.given.erase("from");
    from.clear();
  }
}

int train(TrainOptions options) {
  const StopSignals signals;
  auto& identity = options.identity;
  auto& config = identity.config;
  resolve_restart(options);
  check_contradictions(options);
  resolve_defaults(options);
  std::optional<TrainOptions> before;
  std::optional<SavedRun> saved;
  if (!options.resume.empty()) {
    before = read_config_json(options.resume);
    const CheckpointSeries series(checkpoints_of(options.resume));
    if (options.saves()) {
      series.remove_leftovers(); // it may also put back a checkpoint that was being replaced
    }
    const bool begun = before && series.list().empty();
    saved =
        begun ? run_without_checkpoint(*before, options.resume) : find_saved_run(options.resume);
    adopt_options(identity, *saved, options.given);
    check_weights(*saved, config.from);
    if (saved->is_latest && options.run.empty()) {
      options.run = options.resume;
    }
  }
  if (needs_pretrained(config, saved)) {
    check_weight_files(config.from);
    check_weights_fit(config.model, config.from);
  }
  check_vocab(identity);
  resolve_folder_options(options, before);
  if (options.dry_run) {
    return dry_run(options);
  }
  const bool launched = is_launched();
  std::optional<Room> room;
  Fit fit;
  PlanFor what{.saves = options.saves_on_the_way()};
  const auto check_memory = [&] {
    fit = judge(config, *config.mesh, what, *room);
    check_fit(fit, options.force);
  };
  if (launched) { // the number of ranks is not known before they meet
    room = find_room(options.device, local_rank().num_ranks); // now: no rank has allocated yet
    check(config, MeshShape{});
  } else {
    const auto ranks = resolve_mesh(options, saved, std::nullopt).ranks();
    room = find_room(config.device, ranks);
    check_memory();
    if (wants_processes(options)) {
      become_launcher(options);
    }
  }
  const auto corpus = read_corpus(options);
  corpus.check_context(config.context);
  what.documents = corpus.has_flags();
  if (what.documents && !launched) { // masks take memory, too
    check_memory();
  }
  identity.data = identity.data.empty() ? "" : absolute_path(identity.data);
  identity.fingerprint = corpus.fingerprint();
  if (config.has_lora()) {
    identity.weights = weights_fingerprint(config.from);
  }
  if (saved) {
    check_text(identity, *saved);
  }
  if (launched) {
    const ScopedProcessGroup joined(
        {.backend = options.device == "cpu" ? "gloo" : "",
         .same = shared_settings(options, corpus, saved)});
    resolve_mesh(options, saved, get_world_size());
    check_memory();
    return train_rank(options, fit, corpus, saved);
  }
  std::atomic<int> exit_code{0};
  run_ranks(static_cast<int>(config.mesh->ranks()), [&](int) {
    exit_code = train_rank(options, fit, corpus, saved); // the same on every rank
  });
  return exit_code;
}

} // namespace

void add_train(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("train", "Train a language model over several ranks");
  // The last value of an option counts: scripts append options, and the options of --config come
  // before those of the command line.
  command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  auto options = std::make_shared<TrainOptions>();
  add_options(*command, *options);
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
