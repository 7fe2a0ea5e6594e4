#pragma once

#include <fsdp/optim.h>
#include <fsdp/policy.h>
#include <fsdp/state_dict.h>
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "cli/corpus.h"
#include "cli/model.h"

namespace fsdp::cli {

using Optimizer = optim::AdamW;

/// All that decides a run, besides the text.
struct TrainConfig {
  ModelDims model;
  int64_t context = 128;
  int64_t batch = 32; // rows of all ranks together
  int64_t steps = 200;
  int64_t seed = 1;
  double lr = 2e-3; // at its highest
  ReshardAfterForward reshard_after_forward;
};

/// Throws ConfigError that names the option and the way out.
void check(const TrainConfig& config, int64_t ranks);

/// Warm-up over a tenth of the steps, then a cosine down to a tenth of `lr`.
/// `step` counts from 0.
double learning_rate(const TrainConfig& config, int64_t step);

/// One rank's part of a training run. Everything but the getters is collective:
/// every rank makes the same calls in the same order.
class Trainer {
 public:
  /// Builds the whole model from the seed, the same on every rank, and shards
  /// it: a group per block and one for the rest. Keeps a reference to `corpus`.
  Trainer(const TrainConfig& config, const Corpus& corpus);

  /// One update; the loss before it, averaged over the whole batch. Throws on
  /// every rank when that is not finite.
  double step(int64_t step);
  /// The loss on rows all over the held-out text.
  double validation_loss();
  /// On rank 0: `prompt` and `count` bytes that the model drew to follow it.
  std::string generate(const std::string& prompt, int64_t count);

  /// Model and optimizer: "model.*" and "optim.*". Tensors that exist are the live ones.
  StateDict state_dict();
  /// Takes what `state_dict` gave, and load has filled.
  void set_state_dict(const StateDict& state);

  int64_t num_params() const {
    return num_params_;
  }
  int64_t num_groups() const {
    return static_cast<int64_t>(model_->layers.size()) + 1;
  }
  /// Bytes of the parameters that this rank holds between the steps.
  int64_t shard_bytes() const;

 private:
  /// This rank's part of `total` rows: the first, and how many.
  std::pair<int64_t, int64_t> my_rows(int64_t total) const;
  torch::Tensor loss_of(const torch::Tensor& rows);
  double average(const torch::Tensor& loss) const;

  const TrainConfig config_;
  const Corpus& corpus_;
  Transformer model_;
  int64_t num_params_ = 0;
  std::optional<Optimizer> optimizer_; // made when the parameters are sharded
};

} // namespace fsdp::cli
