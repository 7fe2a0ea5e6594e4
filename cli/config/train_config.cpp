#include "cli/config/train_config.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <map>

#include "cli/check.h"
#include "cli/train/lora.h"
#include "cli/train/rotary.h"

namespace fsdp::cli {

namespace {

// Larger than any useful size, and small enough that the product of two sizes does not overflow.
constexpr int64_t kMost = 1 << 24;

void within(const char* option, int64_t value, int64_t least) {
  check_at_least(option, value, least);
  check_config(value <= kMost, option, " ", value, ": it must be ", kMost, " or less");
}

void check_model(const ModelDims& dims) {
  within("--dim", dims.dim, 2); // first, because other sizes may be derived from it
  within("--vocab", dims.vocab, 1);
  within("--layers", dims.layers, 1);
  within("--heads", dims.heads, 1);
  within("--kv-heads", dims.kv_heads, 1);
  within("--hidden", dims.hidden, 1);
  check_at_least("--window", dims.window, 0);
  check_at_least("--window-from", dims.window_from, 0);
  check_at_least("--full-every", dims.full_every, 0);
  check_at_least("--attention-size", dims.attention_size, 0);
  check_config(
      dims.window > 0 || (dims.full_every == 0 && dims.window_rotary_base == 0),
      "--full-every and --window-rotary-base are for blocks with --window; give one, or leave them "
      "out");
  for (const auto& [option, value] : std::initializer_list<std::pair<const char*, double>>{
           {"--window-rotary-base", dims.window_rotary_base},
           {"--attention-cap", dims.attention_cap},
           {"--score-cap", dims.score_cap}}) {
    check_config(
        value >= 0 && std::isfinite(value), option, " ", value,
        ": it must be 0 or more, and finite");
  }
  (void)RotaryScaling::parse(dims.rotary_scaling);
  (void)Lora::parse(dims.lora);
  check_config(
      dims.head_size >= 0 && dims.head_size % 2 == 0 && dims.head_size <= kMost, "--head-dim ",
      dims.head_size, ": it must be even, or 0 for --dim divided by --heads");
  check_config(
      dims.head_size > 0 || dims.dim % (2 * dims.heads) == 0, "--dim ", dims.dim,
      " cannot be divided into ", dims.heads, " heads of an even size; use for example --dim ",
      (dims.dim / (2 * dims.heads) + 1) * 2 * dims.heads);
  check_config(
      dims.heads % dims.kv_heads == 0, "--kv-heads ", dims.kv_heads,
      ": it must be a divisor of --heads ", dims.heads);
  check_config(
      dims.rotary_base > 1 && std::isfinite(dims.rotary_base), "--rotary-base ", dims.rotary_base,
      ": it must be above 1, and finite");
  check_config(
      dims.norm_eps > 0 && std::isfinite(dims.norm_eps), "--norm-eps ", dims.norm_eps,
      ": it must be above 0, and finite");
}

void check_tensor_axis(const ModelDims& dims, int64_t ranks) {
  const auto divides = [&](const char* option, int64_t size) {
    check_config(
        size % ranks == 0, "--mesh tp=", ranks, ": ", option, " ", size,
        " cannot be divided by it; use a divisor, or another ", option);
  };
  divides("--heads", dims.heads);
  divides("--kv-heads", dims.kv_heads);
  divides("--hidden", dims.hidden);
  divides("--vocab", dims.vocab);
}

void check_float8(const TrainConfig& config, int64_t tensor_ranks) {
  if (!config.has_float8()) {
    return;
  }
  check_config(
      !config.has_lora(), "--float8 ", config.float8,
      ": --lora trains beside weights that stay exact; leave out one of them");
  check_config(
      config.keep_matmuls == "none", "--float8 ", config.float8, ": --keep-matmuls ",
      config.keep_matmuls, " cannot keep products in float8; leave out one of them");
  const auto& dims = config.model;
  const auto is_aligned = [&](const char* option, int64_t size) {
    constexpr int64_t kAligned = 16;
    check_config(
        config.device == "cpu" || size % kAligned == 0, "--float8 ", config.float8, ": ", option,
        " gives a rank matrices with a side of ", size, ", and GPUs need a multiple of ", kAligned);
  };
  is_aligned("--dim", dims.dim);
  is_aligned("--hidden", dims.hidden / tensor_ranks);
  is_aligned("--heads", dims.heads * dims.head_dim() / tensor_ranks);
  is_aligned("--kv-heads", dims.kv_heads * dims.head_dim() / tensor_ranks);
}

void check_offload(const TrainConfig& config) {
  check_config(
      config.device_budget_bytes() == 0 || config.offload, "--device-budget ", config.device_budget,
      ": everything stays on the device without --offload");
  if (!config.step_in_backward) {
    return;
  }
  check_config(
      config.offload || config.device == "cpu",
      "--step-in-backward: it updates parameters in host memory; add --offload");
  check_config(
      config.clip == 0,
      "--step-in-backward: --clip needs all gradients before the first update; add --clip 0, and "
      "use a smaller --lr or a longer --warmup if the gradients are large");
  check_config(
      config.optimizer == "adamw",
      "--step-in-backward: --optimizer muon exchanges matrices of all blocks in one step; use "
      "--optimizer adamw");
  check_config(
      config.param_dtype != "fp16",
      "--step-in-backward: --param-dtype fp16 looks at all gradients before the first update; use "
      "--param-dtype bf16");
}

void check_optimizer(const TrainConfig& config) {
  const auto is_beta = [](double beta) { return beta >= 0 && beta < 1; };
  check_config(
      is_beta(config.beta1) && is_beta(config.beta2), "--betas ", config.beta1, ",", config.beta2,
      ": both must be 0 or more and below 1");
  check_config(
      config.weight_decay >= 0 && std::isfinite(config.weight_decay), "--weight-decay ",
      config.weight_decay, ": it must be 0 or more, and finite");
  check_config(
      config.clip >= 0 && std::isfinite(config.clip), "--clip ", config.clip,
      ": it must be 0 (off) or more, and finite");
  check_config(
      !config.is_low_precision() || config.optimizer == "adamw",
      "--shard-dtype and --moments: only --optimizer adamw can round its results; --optimizer ",
      config.optimizer, " needs fp32");
  check_config(
      !config.has_lora() || config.optimizer == "adamw",
      "--lora: use --optimizer adamw; --optimizer ", config.optimizer,
      " is for whole matrices, not for their factors");
  const auto& added_in = config.reduce_dtype.empty() ? config.param_dtype : config.reduce_dtype;
  check_config(
      !config.sends_bf16() || added_in == "fp32",
      "--send-dtype bf16 is for gradients that are added in fp32; use --reduce-dtype fp32, or "
      "--send-dtype fp32");
  check_config(
      config.rounding == "stochastic" || config.is_low_precision(), "--rounding ", config.rounding,
      ": nothing is rounded in fp32; use it with --shard-dtype bf16 or --moments");
  check_config(
      config.shard_dtype == "fp32" || config.param_dtype != "fp16",
      "--param-dtype fp16 needs --shard-dtype fp32: bf16 has numbers that fp16 does not have");
}

} // namespace

c10::ScalarType muon_dtype(const TrainConfig& config) {
  return config.device == "cpu" ? c10::kFloat : c10::kBFloat16;
}

c10::ScalarType dtype_of(const std::string& name) {
  return name == "bf16"   ? c10::kBFloat16
         : name == "fp16" ? c10::kHalf
         : name == "8bit" ? c10::kFloat8_e4m3fn
                          : c10::kFloat;
}

MixedPrecisionPolicy TrainConfig::precision() const {
  MixedPrecisionPolicy policy;
  if (param_dtype != shard_dtype) {
    policy.param_dtype = dtype_of(param_dtype);
  }
  if (!reduce_dtype.empty()) {
    policy.reduce_dtype = dtype_of(reduce_dtype);
  }
  return policy;
}

int64_t TrainConfig::kept_matmul_bytes() const {
  return keep_matmuls == "none"  ? 0
         : keep_matmuls == "all" ? std::numeric_limits<int64_t>::max()
                                 : parse_bytes("--keep-matmuls", keep_matmuls);
}

int64_t TrainConfig::device_budget_bytes() const {
  return parse_bytes("--device-budget", device_budget);
}

int TrainConfig::num_optimizer_states() const {
  const auto moments_bytes = 2 * c10::elementSize(moments_dtype());
  const auto shard_bytes = c10::elementSize(dtype_of(shard_dtype));
  return static_cast<int>((moments_bytes + shard_bytes - 1) / shard_bytes);
}

int64_t parse_bytes(const std::string& option, const std::string& text) {
  static const std::map<std::string, double> units{
      {"", 1}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  double number = 0;
  const auto* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  const auto unit = units.find({stopped, end});
  constexpr double kMost = 0x1p50;
  check_config(
      error == std::errc() && unit != units.end() && number >= 0 && number * unit->second <= kMost,
      option, " ", text, ": it must be a size like 2GiB, 512MiB or a number of bytes");
  return static_cast<int64_t>(number * unit->second);
}

c10::ScalarType TrainConfig::moments_dtype() const {
  return dtype_of(moments.empty() ? shard_dtype : moments);
}

ReshardAfterForward parse_reshard(const std::string& text, int64_t shard_ranks, bool must_fit) {
  if (text == "auto") {
    return {};
  }
  if (text == "true" || text == "false") {
    return text == "true";
  }
  int64_t ranks = 0;
  const auto end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, ranks);
  check_config(
      error == std::errc() && stopped == end && ranks >= 1, "--reshard-after-forward ", text,
      ": it must be auto, true, false or a number of ranks");
  if (must_fit && shard_ranks % ranks != 0) {
    return true;
  }
  check_config(
      shard_ranks % ranks == 0, "--reshard-after-forward ", ranks, ": the ", shard_ranks,
      " ranks that share the parameters cannot be divided by it; use a divisor");
  return static_cast<int>(ranks);
}

void check(const TrainConfig& config, const MeshShape& mesh, bool allow_uneven) {
  check_at_least("--steps", config.steps, 1);
  within("--ranks", mesh.ranks(), 1);
  check_at_least("--seed", config.seed, 0);
  within("--batch", config.batch, 1);
  within("--context", config.context, 1);
  within("--accumulate", config.accumulate, 1);
  check_model(config.model);
  check_tensor_axis(config.model, mesh.tensor);
  check_float8(config, mesh.tensor);
  check_optimizer(config);
  check_offload(config);
  check_config(
      config.kept_matmul_bytes() == 0 || config.activation_checkpointing, "--keep-matmuls ",
      config.keep_matmuls, ": nothing is recomputed without --activation-checkpointing");
  check_config(
      !config.sends_bf16() || mesh.shard > 1,
      "--send-dtype bf16 is for gradients of shards, and parameters are not sharded; use more "
      "ranks, or leave it out");
  check_config(
      !config.has_lora() || !config.from.empty(), "--lora ", config.model.lora,
      ": it changes a trained model; give its Hugging Face folder with --from");
  check(config.schedule, config.steps);
  const auto shares = mesh.data_ranks() * config.accumulate;
  const bool fits = allow_uneven ? config.batch >= shares : config.batch % shares == 0;
  check_config(
      fits, "--batch ", config.batch, " rows cannot be shared ", allow_uneven ? "" : "evenly ",
      "by ", mesh.data_ranks(), " ranks",
      config.accumulate > 1 ? c10::str(" in ", config.accumulate, " parts each") : "", "; ",
      config.batch < shares ? "use" : "use for example", " --batch ",
      (config.batch + shares - 1) / shares * shares, ", or a number of ranks that divides it");
}

} // namespace fsdp::cli
