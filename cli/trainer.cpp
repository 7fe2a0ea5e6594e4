#include "cli/trainer.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>
#include <vector>

#include <fsdp/distributed.h>
#include <fsdp/fully_shard.h>

#include "cli/check.h"

namespace fsdp::cli {

namespace {

constexpr double kWeightDecay = 0.1;
constexpr int64_t kValidationBatches = 8;
constexpr double kTemperature = 0.8;

Transformer make_model(const TrainConfig& config) {
  Transformer model(config.model);
  init_weights(model, config.seed);
  return model;
}

void shard(Transformer& model, const ReshardAfterForward& reshard_after_forward) {
  for (auto& layer : model->layers) {
    fully_shard(layer, {.reshard_after_forward = reshard_after_forward});
  }
  fully_shard(model, {.reshard_after_forward = reshard_after_forward});
}

/// Weight decay pulls at matrices alone, not at the norms.
Optimizer make_optimizer(const Transformer& model, double lr) {
  std::vector<torch::Tensor> matrices;
  std::vector<torch::Tensor> vectors;
  for (const auto& param : model->parameters()) {
    (param.dim() > 1 ? matrices : vectors).push_back(param);
  }
  const auto options = [&](double weight_decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(lr).betas({0.9, 0.95}).weight_decay(weight_decay));
  };
  return Optimizer(std::vector<torch::optim::OptimizerParamGroup>{
      {matrices, options(kWeightDecay)}, {vectors, options(0)}});
}

} // namespace

void check(const TrainConfig& config, int64_t ranks) {
  const auto at_least = [](const char* option, int64_t value, int64_t least) {
    check_config(value >= least, option, " ", value, ": it must be ", least, " or more");
  };
  at_least("--steps", config.steps, 1);
  at_least("--ranks", ranks, 1);
  at_least("--seed", config.seed, 0);
  at_least("--batch", config.batch, 1);
  at_least("--context", config.context, 1);
  at_least("--layers", config.model.layers, 1);
  at_least("--heads", config.model.heads, 1);
  at_least("--dim", config.model.dim, 2);
  check_config(
      config.lr > 0 && std::isfinite(config.lr), "--lr ", config.lr, ": it must be above 0");
  check_config(
      config.batch % ranks == 0, "--batch ", config.batch, " rows cannot be shared evenly by ",
      ranks, " ranks; ", config.batch < ranks ? "take" : "take for example", " --batch ",
      (config.batch + ranks - 1) / ranks * ranks);
  check_config(
      config.model.dim % (2 * config.model.heads) == 0, "--dim ", config.model.dim,
      " does not make ", config.model.heads, " heads of an even size; take for example --dim ",
      (config.model.dim / (2 * config.model.heads) + 1) * 2 * config.model.heads);
}

double learning_rate(const TrainConfig& config, int64_t step) {
  const auto warm_up = std::max<int64_t>(1, config.steps / 10);
  if (step < warm_up) {
    return config.lr * static_cast<double>(step + 1) / static_cast<double>(warm_up);
  }
  const auto part = static_cast<double>(step - warm_up) /
                    static_cast<double>(std::max<int64_t>(1, config.steps - warm_up));
  return config.lr * (0.1 + 0.9 * 0.5 * (1 + std::cos(std::numbers::pi * part)));
}

Trainer::Trainer(const TrainConfig& config, const Corpus& corpus)
    : config_(config), corpus_(corpus), model_(make_model(config)) {
  for (const auto& param : model_->parameters()) {
    num_params_ += param.numel();
  }
  shard(model_, config.reshard_after_forward);
  optimizer_.emplace(make_optimizer(model_, config.lr));
}

double Trainer::step(int64_t step) {
  const auto [first, count] = my_rows(config_.batch);
  const auto loss = loss_of(corpus_.train_rows(config_.seed, step, first, count, config_.context));
  const auto whole = average(loss.detach());
  TORCH_CHECK(
      std::isfinite(whole), "the loss is ", whole, " in step ", step + 1, "; try a smaller --lr");
  loss.backward();
  for (auto& group : optimizer_->param_groups()) {
    group.options().set_lr(learning_rate(config_, step));
  }
  optimizer_->step();
  optimizer_->zero_grad();
  return whole;
}

double Trainer::validation_loss() {
  const torch::NoGradGuard no_grad;
  const auto total = kValidationBatches * config_.batch;
  auto sum = torch::zeros({}, torch::kDouble);
  for (int64_t batch = 0; batch < kValidationBatches; ++batch) {
    const auto [first, count] = my_rows(config_.batch);
    sum += loss_of(
        corpus_.held_out_rows(batch * config_.batch + first, count, total, config_.context));
  }
  return average(sum / kValidationBatches);
}

std::string Trainer::generate(const std::string& prompt, int64_t count) {
  const torch::NoGradGuard no_grad;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(config_.seed);
  std::vector<int64_t> tokens;
  for (const char c : prompt) {
    tokens.push_back(static_cast<unsigned char>(c));
  }
  for (int64_t i = 0; i < count; ++i) {
    // Every rank takes part in the gathering, but one text is enough: the others
    // have the last token alone.
    const auto most = get_rank() == 0 ? config_.context : 1;
    const auto length = std::min(most, static_cast<int64_t>(tokens.size()));
    const auto last = torch::tensor(std::vector<int64_t>(tokens.end() - length, tokens.end()));
    const auto scores = model_(last.unsqueeze(0)).select(0, 0).select(0, -1);
    const auto chances = torch::softmax(scores / kTemperature, -1);
    tokens.push_back(
        torch::multinomial(chances, 1, /*replacement=*/true, generator).item<int64_t>());
  }
  return {tokens.begin(), tokens.end()};
}

StateDict Trainer::state_dict() {
  StateDict state;
  state.insert_all(get_model_state_dict(model_), "model.");
  state.insert_all(get_optimizer_state_dict(model_, *optimizer_), "optim.");
  return state;
}

void Trainer::set_state_dict(const StateDict& state) {
  // The model's tensors are the live ones, filled already. An optimizer that has
  // not stepped has none yet.
  set_optimizer_state_dict(model_, *optimizer_, state.below("optim."));
}

int64_t Trainer::shard_bytes() const {
  int64_t bytes = 0;
  for (const auto& param : model_->parameters()) {
    bytes += static_cast<int64_t>(param.nbytes());
  }
  return bytes;
}

std::pair<int64_t, int64_t> Trainer::my_rows(int64_t total) const {
  const auto count = total / get_world_size();
  return {count * get_rank(), count};
}

torch::Tensor Trainer::loss_of(const torch::Tensor& rows) {
  const auto inputs = rows.narrow(1, 0, config_.context);
  const auto targets = rows.narrow(1, 1, config_.context);
  const auto scores = model_(inputs);
  return torch::nn::functional::cross_entropy(scores.flatten(0, 1), targets.reshape({-1}));
}

double Trainer::average(const torch::Tensor& loss) const {
  const auto shared = loss.to(torch::kDouble, /*non_blocking=*/false, /*copy=*/true).view({1});
  default_group().all_reduce(shared, ReduceOp::Avg);
  return shared.item<double>();
}

} // namespace fsdp::cli
