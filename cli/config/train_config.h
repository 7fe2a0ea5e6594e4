#pragma once

#include <fsdp/policy.h>

#include <cstdint>
#include <optional>
#include <string>

#include "cli/config/mesh_option.h"
#include "cli/config/schedule.h"
#include "cli/train/model.h"

namespace fsdp::cli {

/// All that decides a run, besides the text.
struct TrainConfig {
  ModelDims model;
  int64_t context = 128;
  int64_t batch = 32; // rows of all ranks together
  int64_t steps = 200;
  int64_t seed = 1;

  Schedule schedule;
  double weight_decay = 0.1; // of matrices
  double beta1 = 0.9;
  double beta2 = 0.95;
  double clip = 1; // of the gradients' norm; 0: as it is
  int64_t accumulate = 1;

  std::optional<MeshShape> mesh; // none: all ranks shard
  ReshardAfterForward reshard_after_forward;
  std::string param_dtype = "fp32";
  std::string reduce_dtype; // empty: as `param_dtype`
  bool offload = false;
  bool activation_checkpointing = false;
  std::string device = "cpu";

  MixedPrecisionPolicy precision() const;
};

/// "bf16", "fp16", "fp32"
c10::ScalarType dtype_of(const std::string& name);
/// Of "true", "false", "auto" or a number. Throws ConfigError.
ReshardAfterForward parse_reshard(const std::string& text, int64_t shard_ranks);

/// Throws ConfigError that names the option and the way out. The rows have to be
/// shared evenly by ranks and parts, and `tp` has to divide the model.
void check(const TrainConfig& config, const MeshShape& mesh);

} // namespace fsdp::cli
