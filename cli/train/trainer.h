#pragma once

#include <fsdp/grad_scaler.h>
#include <fsdp/memory.h>
#include <fsdp/optim.h>
#include <fsdp/state_dict.h>
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/config/train_config.h"
#include "cli/train/corpus.h"
#include "cli/train/model.h"

namespace fsdp::cli {

using Optimizer = optim::AdamW;

/// `step` counts from 0.
double learning_rate(const TrainConfig& config, int64_t step);

/// What one update did; the same on every rank, but for the memory.
struct StepResult {
  double loss = 0; // before the update, averaged over the whole batch
  double grad_norm = 0;
  double lr = 0;
  bool skipped = false; // fp16: gradients were not finite, and the scale goes down
  int asked = 0;        // a signal that came to any rank
  MemoryStats memory;   // of this rank, with the step's peak
};

/// The model on the ranks of a mesh: built without memory, divided and sharded, a
/// group per block and one for the rest. On meta still: fill it next. Collective.
Transformer build_sharded(const TrainConfig& config, const TrainMesh& mesh);

/// Bytes of the parameters that this rank holds between the steps.
int64_t shard_bytes(const Transformer& model);

/// One rank's part of a training run. Everything but the getters is collective:
/// every rank makes the same calls in the same order.
class Trainer {
 public:
  /// The seed decides the weights, whatever the mesh. Keeps a reference to `corpus`.
  Trainer(const TrainConfig& config, const Corpus& corpus);

  /// One update. Throws NonFiniteError on every rank when the loss or a gradient is
  /// not finite; the weights are then those from before. `asked` is a signal that
  /// this rank got, or 0.
  StepResult step(int64_t step, int asked = 0);
  /// The loss on rows all over the held-out text.
  double validation_loss();
  /// On rank 0: `prompt` and `count` bytes that the model drew to follow it.
  std::string generate(const std::string& prompt, int64_t count);

  /// Model and optimizer: "model.*" and "optim.*", and in fp16 "scaler.*". Tensors
  /// that exist are the live ones.
  StateDict state_dict();
  /// Takes what `state_dict` gave, and load has filled.
  void set_state_dict(const StateDict& state);

  const Corpus& corpus() const {
    return corpus_;
  }
  c10::Device device() const {
    return device_;
  }
  int64_t num_params() const {
    return num_params_;
  }
  int64_t shard_bytes() const {
    return cli::shard_bytes(model_);
  }

 private:
  /// This rank's part of `total` rows: the first, and how many.
  std::pair<int64_t, int64_t> my_rows(int64_t total) const;
  torch::Tensor loss_of(const torch::Tensor& rows);
  /// Forward and backward of all parts of a batch; the mean of their losses.
  torch::Tensor accumulate(const torch::Tensor& rows);
  double clip_gradients();
  /// Averages over all ranks.
  std::vector<double> average(const torch::Tensor& values) const;
  /// The first parameter, in the order of the model, that any rank finds not to be
  /// finite, or whose gradient is not; empty if there is none.
  std::string first_bad(bool gradients) const;

  const TrainConfig config_;
  const Corpus& corpus_;
  const c10::Device device_;
  const TrainMesh mesh_;
  Transformer model_;
  int64_t num_params_ = 0;
  std::optional<Optimizer> optimizer_; // made when the parameters are sharded
  GradScaler scaler_;
};

} // namespace fsdp::cli
