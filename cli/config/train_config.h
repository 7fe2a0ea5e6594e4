#pragma once

#include <fsdp/policy.h>

#include <cstdint>
#include <optional>
#include <string>

#include "cli/config/mesh_option.h"
#include "cli/config/schedule.h"
#include "cli/train/model.h"

namespace fsdp::cli {

/// All settings that decide the result of a run, except the text.
struct TrainConfig {
  ModelDims model;
  std::string from; // a Hugging Face folder with the first weights; empty: random ones
  int64_t context = 128;
  std::string document_end = "none"; // attention does not cross this token: a number, or "eos"
  int64_t batch = 32;                // rows of all ranks together
  int64_t steps = 200;
  int64_t seed = 1;

  Schedule schedule;
  std::string optimizer = "adamw"; // "muon" updates the matrices of blocks by Muon
  double weight_decay = 0.1;       // for matrices only
  double beta1 = 0.9;
  double beta2 = 0.95;
  double clip = 1;        // the largest norm of the gradients; 0: no clipping
  int64_t accumulate = 1; // into how many parts a rank divides its rows

  std::optional<MeshShape> mesh; // empty: all ranks shard
  ReshardAfterForward reshard_after_forward;
  std::string param_dtype = "fp32";
  std::string float8 = "none";     // how projections multiply and are gathered: see Float8Scaling
  std::string reduce_dtype;        // empty: as `param_dtype`
  std::string send_dtype = "fp32"; // "bf16" sends gradients in bf16 and adds them in fp32
  std::string shard_dtype = "fp32";
  std::string moments; // of AdamW: "fp32", "bf16" or "8bit"; empty: as `shard_dtype`
  std::string rounding = "stochastic"; // of both, if they are not in fp32; or "nearest"
  bool offload = false;
  std::string device_budget = "0"; // of memory for what --offload leaves on the device
  bool step_in_backward = false;
  bool activation_checkpointing = false;
  std::string keep_matmuls = "none"; // what it keeps: "none", "all" or a size like "2GiB"
  std::string device = "cpu";

  MixedPrecisionPolicy precision() const;
  /// How parameters are stored that LoRA does not train: as they are computed with.
  const std::string& frozen_dtype() const {
    return param_dtype;
  }
  bool has_float8() const {
    return float8 != "none";
  }
  bool has_lora() const {
    return model.lora != "none";
  }
  int64_t device_budget_bytes() const;
  /// How many states of a parameter's size the optimizer keeps, rounded up.
  int num_optimizer_states() const;
  /// How the optimizer stores its moments.
  c10::ScalarType moments_dtype() const;
  bool sends_bf16() const {
    return send_dtype == "bf16";
  }
  /// How many bytes of the results of matrix products and attention a rank keeps for backward, if
  /// it computes the rest again.
  int64_t kept_matmul_bytes() const;
  /// Whether parameters or moments are not in fp32.
  bool is_low_precision() const {
    return shard_dtype != "fp32" || moments_dtype() != c10::kFloat;
  }
};

/// The dtype in which Muon computes. In bf16 a CPU takes several times as long as in fp32.
c10::ScalarType muon_dtype(const TrainConfig& config);
/// The number of bytes of a text like "2GiB", "512MiB" or "1000". Throws ConfigError if it is
/// something else; `option` is for the message.
int64_t parse_bytes(const std::string& option, const std::string& text);
/// The dtype of "bf16", "fp16", "fp32" or "8bit".
c10::ScalarType dtype_of(const std::string& name);
/// Parses "true", "false", "auto" or a number of ranks. Throws ConfigError if the text is something
/// else, or the number does not divide `shard_ranks`. With `must_fit` such a number means "true".
ReshardAfterForward parse_reshard(
    const std::string& text, int64_t shard_ranks, bool must_fit = false);

/// Throws ConfigError with a message that names the option and the remedy. The rows of a batch must
/// be shared evenly by ranks and parts, unless `allow_uneven`: then each needs at least one. `tp`
/// must divide the sizes of the model.
void check(const TrainConfig& config, const MeshShape& mesh, bool allow_uneven = false);

} // namespace fsdp::cli
