#pragma once

#include <fsdp/grad_scaler.h>
#include <fsdp/optim.h>
#include <fsdp/state_dict.h>
#include <fsdp/step_in_backward.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/config/train_config.h"
#include "cli/train/corpus.h"
#include "cli/train/metrics.h"
#include "cli/train/model.h"

namespace fsdp::cli {

/// The learning rate of a step. `step` counts from 0.
double learning_rate(const TrainConfig& config, int64_t step);

/// The device of this rank. With "cuda", the ranks of a machine take turns through its GPUs.
c10::Device pick_device(const std::string& name);

/// Builds the model on the meta device, divides it over the mesh's tensor axis if there is one, and
/// shards it: one group per block and one for the rest. The parameters have no memory yet.
/// Collective.
Transformer build_sharded(const TrainConfig& config, const TrainMesh& mesh);

/// Bytes of the parameters that this rank holds between steps.
int64_t shard_bytes(const Transformer& model);

/// One rank's part of a training run. Everything but the getters is collective:
/// every rank makes the same calls in the same order.
class Trainer {
 public:
  /// Returns the signal that asks this rank to end, or 0.
  using Asked = std::function<int()>;

  /// The weights depend only on the seed, not on the mesh. Keeps a reference to `corpus`.
  Trainer(const TrainConfig& config, const Corpus& corpus, Asked asked = [] { return 0; });

  /// Fills the model from a Hugging Face folder. (Not the matrices of LoRA.)
  void load_pretrained(const std::string& folder);

  /// Makes one update. Throws NonFiniteError on every rank if the loss or a gradient is not finite,
  /// and leaves the weights unchanged, unless backward updates them. (In fp16 a gradient that is
  /// not finite only skips the update.)
  StepResult step(int64_t step);
  /// The mean loss on rows from all over the held-out text. Meaningless if `stop` is set then.
  double validation_loss();
  /// Returns, on rank 0, `prompt` followed by `count` bytes that the model generates, or fewer if
  /// `stop` is set then.
  std::string generate(const std::string& prompt, int64_t count);

  /// The signal that asked any rank to end, or 0. The same on every rank.
  int stop() const {
    return stop_;
  }

  /// The state of the trained parameters ("model.*"), the optimizer ("optim.*") and, in fp16, the
  /// scaler ("scaler.*"). It shares the trainer's tensors, if these exist already.
  StateDict state_dict();
  /// Sets the state from a result of `state_dict` that `load` has filled.
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
  /// Rows of a batch.
  struct Rows {
    torch::Tensor mine; // of this rank
    /// How many tokens of the whole batch the model has to predict.
    int64_t num_predicted = 0;
  };
  Rows rows_of(const std::function<torch::Tensor(int64_t first, int64_t count)>& read) const;
  /// The scaled loss of a part of this rank's rows. Summed over the parts and averaged over the
  /// ranks, it is the batch's mean.
  torch::Tensor shared_loss(const torch::Tensor& part, int64_t num_predicted);
  /// Runs forward and backward on all parts of the rows. Returns the sum of their losses.
  torch::Tensor accumulate(const Rows& rows);
  double clip_gradients();
  /// Ends the updates that backward has begun. Returns the norm of the gradients.
  double finish_updates();
  /// The average of each value over all ranks. The ranks also agree on `stop` by this.
  std::vector<double> average(const torch::Tensor& values);
  /// The name of the first parameter, in the order of the model, that is not finite on some rank.
  /// With `gradients`, the first one whose gradient is not finite. Empty if there is none.
  std::string first_non_finite(bool gradients) const;
  /// Says the same for a message. Collective.
  std::string where_not_finite() const;

  const TrainConfig config_;
  const Corpus& corpus_;
  const Asked asked_;
  int stop_ = 0;
  const c10::Device device_;
  const TrainMesh mesh_;
  Transformer model_;
  int64_t num_params_ = 0;
  std::unique_ptr<torch::optim::Optimizer> optimizer_; // made after the parameters are sharded
  /// The squares of this rank's gradients in this step, added up. A parameter that several ranks
  /// have counts in parts.
  double grad_squares_ = 0;
  std::unique_ptr<optim::StepInBackward> updates_; // only with --step-in-backward
  GradScaler scaler_;
};

} // namespace fsdp::cli
