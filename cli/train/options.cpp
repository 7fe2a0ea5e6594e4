#include "cli/train/options.h"

#include <fsdp/distributed.h>
#include <fsdp/launch.h>
#include <torch/cuda.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cli/check.h"
#include "cli/config/hf_config.h"
#include "cli/config/option_list.h"
#include "cli/config/presets.h"
#include "cli/files.h"
#include "cli/train/folder_options.h"
#include "cli/train/lora.h"
#include "cli/train/run_lock.h"

namespace fsdp::cli {

namespace {

constexpr int kDefaultRanks = 4;
constexpr int kMany = 1 << 20; // more ranks or restarts than anybody has

/// Scripts give '' if a variable of theirs is not set. CLI11 would take it for 0.
const CLI::Validator kNotEmpty(
    [](const std::string& text) {
      return std::string(text.empty() ? "it has no value; give one, or leave the option out" : "");
    },
    "");

/// Returns a function that adds an option to this group of --help.
auto adder_to(CLI::App& command, const char* group, bool shows_defaults = false) {
  command.option_defaults()->group(group);
  return [&command, shows_defaults](const char* name, auto& value, const std::string& help) {
    auto* option = command.add_option(name, value, help);
    return shows_defaults ? option->capture_default_str() : option;
  };
}

/// Sizes that are not given become those of --model, see `resolve_defaults`.
void add_model_options(CLI::App& command, TrainOptions& options) {
  auto& dims = options.identity.config.model;
  std::string names;
  for (const auto& preset : model_presets()) {
    names += (names.empty() ? "" : ", ") + preset.name;
  }
  const auto add = adder_to(command, "Model");
  add("--model", options.model, "Size of the model: " + names)->capture_default_str();
  add("--dim", dims.dim, "Width of the model");
  add("--layers", dims.layers, "Number of blocks");
  add("--heads", dims.heads, "Number of attention heads");
  add("--kv-heads", dims.kv_heads, "Heads for keys and values [half of --heads]");
  add("--hidden", dims.hidden, "Width inside the feed-forward part [8/3 of --dim]");
  add("--vocab", dims.vocab, "Number of tokens; bytes need 256");
  add("--tied", dims.tied, "Use the embedding's weight for the output, too: true or false");
  add("--rotary-base", dims.rotary_base, "Base of the rotary positions");
  add("--norm-eps", dims.norm_eps, "What norms add to the mean square, so as not to divide by 0");
  add("--from", options.identity.config.from,
      "Hugging Face folder to begin with: its sizes and weights (gemma 1 to 3, llama, mistral, "
      "qwen2, qwen3)");
  add("--lora", dims.lora,
      "Train two small matrices beside each projection of --from, and nothing else; for example "
      "rank=16, or rank=16,alpha=32,targets=q_proj+v_proj [alpha: twice the rank; all seven]");
  command.option_defaults()->group("Model, where it differs from Llama");
  add("--head-dim", dims.head_size, "Size of a head; 0: --dim divided by --heads");
  add("--qkv-bias", dims.qkv_bias, "Biases for queries, keys and values: true or false");
  add("--o-bias", dims.o_bias, "A bias behind attention: true or false");
  add("--mlp-bias", dims.mlp_bias, "Biases in the feed-forward part: true or false");
  add("--qk-norm", dims.qk_norm, "Normalize queries and keys: true or false");
  add("--window", dims.window, "How many tokens back attention reaches; 0: all");
  add("--window-from", dims.window_from, "Number of the first block with --window");
  add("--full-every", dims.full_every, "Every N-th block has no --window; 0: all have it");
  add("--window-rotary-base", dims.window_rotary_base,
      "Base of the rotary positions in blocks with --window; 0: as in the others");
  add("--rotary-scaling", dims.rotary_scaling,
      "Stretch the rotary positions: none, linear:FACTOR or llama3:FACTOR,LOW,HIGH,ORIGINAL");
  add("--gemma", dims.gemma, "GELU, norms by 1 + weight and a scaled embedding: true or false");
  add("--sandwich-norms", dims.sandwich_norms,
      "Also norms behind attention and behind the feed-forward part: true or false");
  add("--attention-size", dims.attention_size,
      "Divide attention scores by the square root of this; 0: the size of a head");
  add("--attention-cap", dims.attention_cap,
      "Attention scores s become CAP * tanh(s / CAP); 0: no cap");
  add("--score-cap", dims.score_cap, "Cap the scores of the next token in the same way; 0: no cap");
}

void add_training_options(CLI::App& command, TrainOptions& options) {
  auto& config = options.identity.config;
  const auto add = adder_to(command, "Training", /*shows_defaults=*/true);
  add("--steps", config.steps, "Number of updates");
  add("--batch", config.batch, "Rows per update, of all ranks together");
  add("--context", config.context, "Tokens per row");
  add("--data", options.identity.data,
      "File or folder of text, a .jsonl file of examples, or files of tokens: .bin or .npy, or a "
      "pattern for several; or a .json file with weights of several such paths [LibTorch's C++ "
      "headers]");
  add("--document-end", config.document_end,
      "Attention does not cross this token: its number, or eos for the eos_token of --from");
  add("--token-dtype", options.token_dtype,
      "What a .bin file without a header holds: uint16, uint32 or auto, which means uint32 if "
      "--vocab does not fit into 16 bits")
      ->check(CLI::IsMember({"auto", "uint16", "uint32"}));
  add("--seed", config.seed, "Seed of weights, batches and sample");
  add("--lr", config.schedule.lr, "Highest learning rate; 0.01 with --optimizer muon");
  add("--schedule", config.schedule.kind, "Decay of the learning rate after the warm-up")
      ->check(CLI::IsMember({"cosine", "linear", "constant"}));
  command.add_option(
      "--warmup", config.schedule.warmup, "Steps of the warm-up [a tenth of --steps]");
  command.add_option(
      "--min-lr", config.schedule.min_lr, "Learning rate at the end [a tenth of --lr]");
  add("--optimizer", config.optimizer,
      "adamw, or muon: matrices of the blocks by Muon, and the rest by AdamW")
      ->check(CLI::IsMember({"adamw", "muon"}));
  add("--weight-decay", config.weight_decay, "Weight decay of matrices");
  command.add_option_function<std::string>(
      "--betas",
      [&](const std::string& text) {
        char rest = 0;
        check_config(
            std::sscanf(text.c_str(), "%lf,%lf%c", &config.beta1, &config.beta2, &rest) == 2,
            "--betas ", text, ": it must be two numbers, for example 0.9,0.95");
        options.given.insert({"beta1", "beta2"});
      },
      "Betas of AdamW [0.9,0.95]");
  add("--clip", config.clip, "Largest norm of the gradients; 0: no clipping");
  add("--accumulate", config.accumulate,
      "Number of parts into which a rank divides its rows, to save memory");
  command.add_option(
      "--validate-every", options.validate_every, "Updates between validations [only at the end]");
}

void add_rank_options(CLI::App& command, TrainOptions& options) {
  auto& config = options.identity.config;
  const auto add = adder_to(command, "Ranks and memory");
  const CLI::IsMember dtypes({"bf16", "fp16", "fp32"});
  add("--ranks", options.ranks,
      "Number of ranks [one per GPU if there are several, else 4]; a launcher (fsdp run, torchrun, "
      "srun) decides it itself");
  add("--mesh", options.mesh,
      "Sizes of the axes, e.g. dp=2,shard=2,tp=2: replicas, shards, tensor parallel");
  add("--reshard-after-forward", options.reshard,
      "Free parameters between forward and backward: auto, true, false, or shard them over this "
      "number of ranks")
      ->capture_default_str();
  add("--param-dtype", config.param_dtype, "Dtype to gather and compute in: bf16, fp16, fp32")
      ->capture_default_str()
      ->check(dtypes);
  add("--float8", config.float8,
      "How projections multiply and are gathered in float8: none, tensorwise (one scale for each "
      "tensor) or rowwise (one for each row)")
      ->capture_default_str()
      ->check(CLI::IsMember({"none", "tensorwise", "rowwise"}));
  add("--reduce-dtype", config.reduce_dtype, "Dtype to reduce gradients in [--param-dtype]")
      ->check(dtypes);
  add("--send-dtype", config.send_dtype,
      "bf16 sends gradients in bf16 and adds them in fp32, which --reduce-dtype must be")
      ->capture_default_str()
      ->check(CLI::IsMember({"bf16", "fp32"}));
  add("--shard-dtype", config.shard_dtype,
      "Dtype to keep parameters in: bf16 takes half the memory of fp32, and AdamW rounds its "
      "results")
      ->capture_default_str()
      ->check(CLI::IsMember({"bf16", "fp32"}));
  add("--moments", config.moments, "Dtype of AdamW's moments: 8bit, bf16, fp32 [--shard-dtype]")
      ->check(CLI::IsMember({"8bit", "bf16", "fp32"}));
  add("--rounding", config.rounding,
      "How AdamW rounds; nearest loses small updates, and is for comparison only")
      ->capture_default_str()
      ->check(CLI::IsMember({"stochastic", "nearest"}));
  add("--device", options.device, "auto, cpu or cuda")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  command.add_flag(
      "--processes", options.processes,
      "Run ranks as processes over NCCL or gloo, not as threads [if there are several GPUs]");
  add("--restarts", options.restarts,
      "How many times to start again when a rank is lost; ranks are processes then")
      ->check(CLI::Range(0, kMany));
  add("--min-ranks", options.min_ranks,
      "Start again without the lost ranks, if at least this many are left [on all again]")
      ->check(CLI::Range(1, kMany));
  command.add_flag("--offload", config.offload, "Keep shards and optimizer in host memory");
  add("--device-budget", config.device_budget,
      "With --offload: keep the first blocks on the device, as many as fit into this much of each "
      "rank's memory, like 20GiB")
      ->capture_default_str();
  command.add_flag(
      "--step-in-backward", config.step_in_backward,
      "Update each block while backward goes on to the next one; needs --clip 0");
  command.add_flag(
      "--activation-checkpointing", config.activation_checkpointing,
      "Recompute each block in backward, to save memory");
  add("--keep-matmuls", config.keep_matmuls,
      "With --activation-checkpointing: results of matrix products and attention that are not "
      "recomputed; none, all, or as many as fit into this much memory of each rank, like 2GiB")
      ->capture_default_str();
  command.add_flag("--force", options.force, "Begin even if the plan does not fit into memory");
}

void add_file_options(CLI::App& command, TrainOptions& options) {
  const auto add = adder_to(command, "Files");
  add("--run", options.run, "Folder of this run [runs/<date and time>]");
  add("--save-every", options.save_every,
      "Updates between checkpoints; 0: save only at the end [a tenth of --steps, at most 1000]");
  add("--keep", options.keep.keep, "How many of the newest checkpoints to keep")
      ->capture_default_str();
  add("--keep-every", options.keep.keep_every, "Also keep the checkpoint of every N-th step");
  add("--resume", options.resume,
      "Continue a run from its folder, or from one of its checkpoints, on any --mesh; options that "
      "are not given keep their values");
  command.add_flag(
      "--go-on", options.go_on, "Continue the run in the folder of --run, if there is one");
  command.add_flag("--no-save", options.no_save, "Write no files");
  add("--peak-tflops", options.peak_tflops,
      "Peak TFLOP/s of a device, for the utilisation (MFU); 0: that of the GPU, if it is known")
      ->capture_default_str();
  command.add_flag("--csv", options.csv, "Also write the metrics as a table, metrics.csv");
  command.add_flag(
      "--tensorboard", options.tensorboard,
      "Also write the metrics for TensorBoard, into the folder tensorboard of the run");
  // Only for --help: `main` has already replaced --config by the options in the file.
  command.add_option(
      "--config", "JSON or TOML file with any of these options; the command line wins");
}

} // namespace

void add_options(CLI::App& command, TrainOptions& options) {
  add_model_options(command, options);
  add_training_options(command, options);
  add_rank_options(command, options);
  add_file_options(command, options);
  command.option_defaults()->group("Screen");
  command.add_flag("--quiet", options.quiet, "Print only the result");
  command.add_flag("--json", options.json, "Print one JSON object per line");
  command.add_flag(
      "--dry-run", options.dry_run, "Print what a run would need, for any number of ranks");
  for (auto* option : command.get_options()) {
    if (option->get_items_expected_min() > 0) { // not a flag
      option->check(kNotEmpty);
    }
  }
}

namespace {

/// Sets the sizes of the model to those in the folder of --from.
void take_pretrained_sizes(TrainOptions& options) {
  auto& config = options.identity.config;
  check_config(
      !options.given.contains("model"), "--model ", options.model,
      ": --from has the sizes of the model; leave it out");
  const auto given = config;
  const auto [dims, longest] = read_hf_config(config.from);
  config.model = dims;
  config.model.lora = given.model.lora;
  for_each_option([&](const char* name, auto in, bool fixed) {
    if (fixed && options.given.contains(name)) {
      check_config(
          in(given) == in(config), "--", name, " ", in(given), ": the model of --from has --", name,
          " ", in(config), "; leave it out");
    }
  });
  if (longest > 0) {
    if (!options.given.contains("context")) {
      config.context = std::min(config.context, longest);
    }
    check_config(
        config.context <= longest, "--context ", config.context, ": the model of --from takes ",
        longest, " tokens at most");
  }
}

} // namespace

void resolve_defaults(TrainOptions& options) {
  auto& config = options.identity.config;
  config.from = config.from.empty() ? "" : real_path(config.from);
  const auto given = config;
  if (config.from.empty()) {
    config.model = model_preset(options.model);
  } else {
    take_pretrained_sizes(options);
  }
  const auto take_given = [&] {
    for_each_option([&](const char* name, auto in, bool) {
      if (options.given.contains(name)) {
        in(config) = in(given);
      }
    });
  };
  take_given();
  auto& dims = config.model;
  const bool derives = config.from.empty();
  if (derives && options.given.contains("heads")) { // kv_heads follows from heads, hidden from dim
    dims.kv_heads = default_kv_heads(dims.heads);
  }
  if (derives && options.given.contains("dim")) {
    dims.hidden = default_hidden(dims.dim);
  }
  if (config.optimizer == "muon") {
    config.schedule.lr = kMuonLr;
  }
  config.moments = config.shard_dtype;
  take_given(); // again: kv_heads, hidden, lr and moments may have been given, too
  const auto lora = Lora::parse(dims.lora);
  dims.lora = lora ? lora->str() : "none"; // the same text for the same meaning
}

void resolve_folder_options(TrainOptions& options, const std::optional<TrainOptions>& before) {
  if (before) {
    const auto take = [&](const char* name, auto& mine, const auto& theirs) {
      if (!options.given.contains(name)) {
        mine = theirs;
      }
    };
    take("save-every", options.save_every, before->save_every);
    for_each_folder_option(
        [&](const char* name, auto in) { take(name, in(options), in(*before)); });
  }
  if (!options.save_every) {
    options.save_every = std::clamp<int64_t>(options.identity.config.steps / 10, 1, 1000);
  }
}

MeshShape resolve_mesh(
    TrainOptions& options, const std::optional<SavedRun>& saved, std::optional<int> launched) {
  auto& config = options.identity.config;
  check_config(
      !launched || options.ranks.value_or(*launched) == *launched, "--ranks ",
      options.ranks.value_or(0), ": the launcher started ", launched.value_or(0),
      "; leave --ranks out, or start fsdp train without a launcher");
  std::optional<int64_t> ranks = launched ? launched : options.ranks;
  check_at_least("--ranks", ranks.value_or(1), 1);
  const auto num_gpus = static_cast<int>(torch::cuda::device_count());
  check_config(
      options.device != "cuda" || num_gpus > 0,
      "--device cuda: there is no such device here; see fsdp doctor");
  config.device = options.device == "auto" ? (num_gpus > 0 ? "cuda" : "cpu") : options.device;
  auto mesh = options.mesh;
  if (mesh.empty() && !ranks) {
    mesh = saved ? saved->mesh : "";
    ranks = saved                                     ? saved->ranks
            : config.device == "cuda" && num_gpus > 1 ? num_gpus
                                                      : kDefaultRanks;
  }
  // A job that starts again goes on with whatever is left.
  const bool must_fit = launched && num_restarts() > 0;
  config.mesh = must_fit ? fit_mesh(mesh, *launched) : parse_mesh(mesh, ranks);
  config.reshard_after_forward = parse_reshard(options.reshard, config.mesh->shard, must_fit);
  check(config, *config.mesh, /*allow_uneven=*/must_fit);
  return *config.mesh;
}

bool wants_processes(const TrainOptions& options) {
  const auto& config = options.identity.config;
  const auto ranks = config.mesh->ranks();
  const auto num_gpus = static_cast<int64_t>(torch::cuda::device_count());
  const bool several_gpus = config.device == "cuda" && num_gpus > 1;
  const bool wanted = options.restarts > 0 || (ranks > 1 && (options.processes || several_gpus));
  check_config(
      !wanted || config.device != "cuda" || ranks <= num_gpus || nccl_shares_gpus(), ranks,
      " ranks as processes, but ", num_gpus, num_gpus == 1 ? " GPU" : " GPUs",
      ": NCCL needs one for each; use --ranks ", num_gpus,
      num_gpus == 1 ? ", or leave --processes out for threads," : "",
      " or --device cpu. NCCL 2.30 or later can share a GPU: NCCL_MULTI_RANK_GPU_ENABLE=1");
  return wanted;
}

void check_contradictions(const TrainOptions& options) {
  check_config(
      options.peak_tflops >= 0 && std::isfinite(options.peak_tflops), "--peak-tflops ",
      options.peak_tflops, ": it must be 0 or more");
  check_at_least("--save-every", options.save_every.value_or(0), 0);
  check_at_least("--validate-every", options.validate_every, 0);
  // Inside the program, -1 stands for the default of these two.
  const auto& schedule = options.identity.config.schedule;
  check_config(
      !options.given.contains("warmup") || schedule.warmup >= 0, "--warmup ", schedule.warmup,
      ": it must be 0 or more");
  check_config(
      !options.given.contains("min-lr") || schedule.min_lr >= 0, "--min-lr ", schedule.min_lr,
      ": it must be 0 or more");
  check_at_least("--keep", options.keep.keep, 1);
  check_at_least("--keep-every", options.keep.keep_every, 0);
  const auto apart = [](bool one_is_on, const char* one, bool other_is_on, const char* other,
                        const char* advice) {
    check_config(
        !one_is_on || !other_is_on, one, " and ", other, " contradict each other; ", advice);
  };
  const bool saves_on_the_way = options.given.contains("save-every") && options.save_every > 0;
  const bool resumes = !options.resume.empty();
  apart(options.quiet, "--quiet", options.json, "--json", "use only one of them");
  apart(
      options.no_save, "--no-save", !options.run.empty(), "--run",
      "leave out --no-save to write there");
  apart(
      options.no_save, "--no-save", saves_on_the_way, "--save-every",
      "leave out --no-save to save");
  apart(options.no_save, "--no-save", options.csv, "--csv", "leave out --no-save to write");
  apart(
      options.no_save, "--no-save", options.tensorboard, "--tensorboard",
      "leave out --no-save to write");
  apart(
      options.dry_run, "--dry-run", resumes, "--resume",
      "a dry run reads no checkpoint: give the options of the run");
  apart(
      resumes, "--resume", options.given.contains("model"), "--model",
      "the checkpoint has the sizes: leave --model out");
  const bool goes_on =
      real_path(options.run) == real_path(options.resume); // also if neither was given
  if (!goes_on && !options.run.empty() &&
      !CheckpointSeries(checkpoints_of(options.run)).list().empty()) {
    RunLock::check_free(options.run);
    throw_config_error(
        "--run ", options.run,
        " has checkpoints of an earlier run; continue that run with --resume ", options.run,
        ", or use another folder");
  }
}

} // namespace fsdp::cli
