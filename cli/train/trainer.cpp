#include "cli/train/trainer.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>

#include <fsdp/activation_checkpointing.h>
#include <fsdp/clip_grad_norm.h>
#include <fsdp/distributed.h>
#include <fsdp/error.h>
#include <fsdp/float8.h>
#include <fsdp/fully_shard.h>
#include <fsdp/meta_init.h>

#include "cli/check.h"
#include "cli/train/loss.h"
#include "cli/train/pretrained.h"
#include "cli/train/sampler.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kValidationBatches = 8;
using torch::optim::OptimizerParamGroup;
using Tensors = std::vector<torch::Tensor>;

/// A parameter group by AdamW.
OptimizerParamGroup adamw_group(Tensors params, const TrainConfig& config, double weight_decay) {
  return {
      std::move(params),
      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(config.schedule.lr)
                                                       .betas({config.beta1, config.beta2})
                                                       .weight_decay(weight_decay))};
}

/// A parameter group of AdamW that rounds its results.
OptimizerParamGroup low_precision_group(
    Tensors params, const TrainConfig& config, double weight_decay) {
  return {
      std::move(params), std::make_unique<optim::LowPrecisionAdamWOptions>(
                             optim::LowPrecisionAdamWOptions(config.schedule.lr)
                                 .betas({config.beta1, config.beta2})
                                 .weight_decay(weight_decay)
                                 .moments(config.moments_dtype())
                                 .stochastic_rounding(config.rounding == "stochastic")
                                 .seed(config.seed))};
}

/// A parameter group of Muon, with the learning rate and weight decay that suit AdamW, too.
OptimizerParamGroup muon_group(
    Tensors params, const TrainConfig& config, double weight_decay, bool adamw) {
  return {
      std::move(params),
      std::make_unique<optim::MuonOptions>(optim::MuonOptions(config.schedule.lr)
                                               .match_rms_adamw(true)
                                               .ns_dtype(muon_dtype(config))
                                               .weight_decay(weight_decay)
                                               .adamw(adamw)
                                               .betas({config.beta1, config.beta2}))};
}

/// Weight decay applies only to matrices, not to the weights of norms. Muon is for the matrices
/// inside of the model, not for those of its first and last layer.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const Transformer& model, const TrainConfig& config) {
  Tensors inner;
  Tensors outer;
  Tensors vectors;
  for (const auto& item : model->named_parameters()) {
    if (!item.value().requires_grad()) {
      continue;
    }
    const bool is_inner = item.key().starts_with("layers.");
    (item.value().dim() < 2 ? vectors : is_inner ? inner : outer).push_back(item.value());
  }
  if (config.optimizer == "muon") {
    return std::make_unique<optim::Muon>(std::vector{
        muon_group(inner, config, config.weight_decay, false),
        muon_group(outer, config, config.weight_decay, true),
        muon_group(vectors, config, 0, true)});
  }
  inner.insert(inner.end(), outer.begin(), outer.end());
  if (config.is_low_precision()) {
    return std::make_unique<optim::LowPrecisionAdamW>(std::vector{
        low_precision_group(inner, config, config.weight_decay),
        low_precision_group(vectors, config, 0)});
  }
  return std::make_unique<optim::AdamW>(std::vector{
      adamw_group(inner, config, config.weight_decay), adamw_group(vectors, config, 0)});
}

[[noreturn]] void stop_at(int64_t step, const std::string& what) {
  throw NonFiniteError(
      {__func__, __FILE__, __LINE__},
      c10::str(
          what, " in step ", step + 1,
          "; try a smaller --lr, a longer --warmup or a --clip, or another --param-dtype"));
}

/// The square of the norm of this rank's part of a gradient, divided by the number of ranks that
/// have the same part.
double norm_square_of(const torch::Tensor& param) {
  const auto sharded = as_dtensor(param);
  double parts = 1;
  for (int64_t axis = 0; axis < sharded.device_mesh().ndim(); ++axis) {
    if (!std::holds_alternative<Replicate>(sharded.placements()[static_cast<size_t>(axis)])) {
      parts *= static_cast<double>(sharded.device_mesh().size(axis));
    }
  }
  const auto norm = at::linalg_vector_norm(param.grad(), 2, {}, false, torch::kDouble);
  return norm.square().item<double>() * parts / get_world_size();
}

/// Projections multiply and are gathered in float8. Call it when they are sharded.
void use_float8(const Transformer& model, Float8Scaling scaling) {
  for (const auto& module : model->modules()) {
    if (const auto projection = std::dynamic_pointer_cast<ProjectionImpl>(module)) {
      projection->float8 = scaling;
      set_all_gather_extension(projection->weight, float8_all_gather(scaling));
    }
  }
}

} // namespace

c10::Device pick_device(const std::string& name) {
  c10::Device device(name);
  if (device.is_cpu()) {
    return device;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  device.set_index(static_cast<c10::DeviceIndex>(get_local_rank() % guard.deviceCount()));
  guard.setDevice(device);
  memory_stats(device);
  // Torch decides which kernels of attention come first when it is asked for the first time. Ranks
  // that are threads and ask at the same time could get different ones.
  static std::once_flag is_decided;
  std::call_once(is_decided, [&] {
    const auto x = torch::zeros({1, 1, 8, 8}, torch::TensorOptions(device).dtype(torch::kHalf));
    at::_fused_sdp_choice(x, x, x);
  });
  return device;
}

double learning_rate(const TrainConfig& config, int64_t step) {
  return learning_rate(config.schedule, step, config.steps);
}

Transformer build_sharded(const TrainConfig& config, const TrainMesh& mesh) {
  Transformer model{nullptr};
  {
    const MetaInit on_meta;
    model = Transformer(config.model);
    model->to(dtype_of(config.shard_dtype));
    for (auto& param : model->parameters()) {
      if (!param.requires_grad()) {
        param.set_data(param.to(dtype_of(config.frozen_dtype())));
      }
    }
  }
  if (mesh.tensor) {
    parallelize(model, *mesh.tensor);
  }
  FullyShardOptions options{
      .mesh = mesh.data,
      .reshard_after_forward = config.reshard_after_forward,
      .mp_policy = config.precision()};
  if (config.offload) {
    options.offload_policy = CPUOffloadPolicy{
        .budget = DeviceBudget(config.device_budget_bytes(), config.num_optimizer_states())};
  }
  const auto shard = [&](auto& module) {
    auto sharded = fully_shard(module, options);
    if (config.sends_bf16()) {
      sharded.set_custom_reduce_scatter(std::make_shared<WideSumReduceScatter>());
    }
  };
  ActivationCheckpointOptions recompute;
  if (config.keep_matmuls != "none") {
    recompute.save =
        config.keep_matmuls == "all" ? save_matmuls() : save_within(config.kept_matmul_bytes());
  }
  for (auto& layer : model->layers) {
    if (config.activation_checkpointing) {
      apply_activation_checkpointing(layer, recompute);
    }
    shard(layer);
  }
  shard(model);
  if (config.has_float8()) {
    use_float8(
        model, config.float8 == "rowwise" ? Float8Scaling::rowwise : Float8Scaling::tensorwise);
  }
  return model;
}

int64_t shard_bytes(const Transformer& model) {
  int64_t bytes = 0;
  for (const auto& param : model->parameters()) {
    bytes += static_cast<int64_t>(param.nbytes());
  }
  return bytes;
}

Trainer::Trainer(const TrainConfig& config, const Corpus& corpus, Asked asked)
    : config_(config),
      corpus_(corpus),
      asked_(std::move(asked)),
      device_(pick_device(config.device)),
      mesh_(config.mesh.value_or(MeshShape{.shard = get_world_size()}), device_.type()),
      model_(build_sharded(config, mesh_)),
      scaler_({.enabled = config.param_dtype == "fp16"}) {
  memory_stats(device_); // begins to count before anything is allocated
  to_empty(model_);
  const auto seed = static_cast<uint64_t>(config.seed);
  if (config.from.empty()) { // else load_pretrained fills them
    init_weights(model_, seed);
  } else if (config.has_lora()) {
    init_adapters(model_, seed);
  }
  for (const auto& item : named_dtensors(model_)) {
    num_params_ += item.value().numel();
  }
  optimizer_ = make_optimizer(model_, config);
  if (config.step_in_backward) {
    updates_ =
        std::make_unique<optim::StepInBackward>(model_, *optimizer_, [this](const Tensors& params) {
          for (const auto& param : params) {
            grad_squares_ += norm_square_of(param);
          }
        });
  }
}

StepResult Trainer::step(int64_t step) {
  reset_peak_memory_stats(device_);
  StepResult result;
  result.lr = learning_rate(config_, step);
  for (auto& group : optimizer_->param_groups()) {
    group.options().set_lr(result.lr);
  }
  const auto loss = accumulate(rows_of([&](int64_t first, int64_t count) {
    return corpus_.train_rows(
        {static_cast<uint64_t>(config_.seed), step, config_.batch, config_.context}, first, count);
  }));
  const auto updated_norm = updates_ ? finish_updates() : 0;
  result.loss = average(loss.view({1}))[0];
  if (!std::isfinite(result.loss)) {
    stop_at(step, c10::str("the loss is ", result.loss, updates_ ? "" : where_not_finite()));
  }
  if (scaler_.is_enabled()) {
    scaler_.unscale_(*optimizer_);
  }
  result.grad_norm = updates_ ? updated_norm : clip_gradients();
  if (!std::isfinite(result.grad_norm) && !scaler_.is_enabled()) {
    // After a step in backward there are no gradients, but the parameter is not finite either.
    const auto param = first_non_finite(/*gradients=*/!updates_);
    stop_at(step, "the first gradient that is not finite is that of " + param);
  }
  if (!updates_) {
    result.skipped = !scaler_.step(*optimizer_);
    scaler_.update();
    optimizer_->zero_grad();
  }
  result.memory = memory_stats(device_);
  return result;
}

std::string Trainer::where_not_finite() const {
  if (const auto param = first_non_finite(/*gradients=*/false); !param.empty()) {
    return ", and the first parameter that is not finite is " + param + ",";
  }
  if (const auto param = first_non_finite(/*gradients=*/true); !param.empty()) {
    return ", and the first gradient that is not finite is that of " + param + ",";
  }
  return ", though all parameters and gradients are finite,";
}

torch::Tensor Trainer::accumulate(const Rows& rows) {
  auto root = FSDPModule::of(model_);
  const auto parts = rows.mine.tensor_split(config_.accumulate);
  auto sum = torch::zeros({}, torch::TensorOptions(device_).dtype(torch::kDouble));
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool is_last = i + 1 == parts.size();
    root.set_requires_gradient_sync(is_last); // reduces gradients only once
    root.set_is_last_backward(is_last);
    const auto loss = shared_loss(parts[i], rows.num_predicted);
    sum += loss.detach();
    scaler_.scale(loss).backward();
  }
  return sum;
}

double Trainer::finish_updates() {
  updates_->finish();
  const auto squares = torch::tensor(
      {std::exchange(grad_squares_, 0)}, torch::TensorOptions(device_).dtype(torch::kDouble));
  default_group().all_reduce(squares);
  return std::sqrt(squares.item<double>());
}

double Trainer::clip_gradients() {
  const auto most = config_.clip > 0 ? config_.clip : std::numeric_limits<double>::infinity();
  // In fp16 the scaler skips a step whose gradients are not finite. Otherwise the run ends, and
  // scaling by a NaN norm would make all gradients NaN and hide the first one.
  const bool must_be_finite = !scaler_.is_enabled();
  Tensors trained;
  for (const auto& param : model_->parameters()) {
    if (param.requires_grad()) {
      trained.push_back(param);
    }
  }
  try {
    return clip_grad_norm_(trained, most, 2, must_be_finite).item<double>();
  } catch (const NonFiniteError&) {
    return std::numeric_limits<double>::quiet_NaN();
  }
}

double Trainer::validation_loss() {
  const torch::NoGradGuard no_grad;
  const auto total = kValidationBatches * config_.batch;
  double sum = 0;
  for (int64_t batch = 0; batch < kValidationBatches && stop_ == 0; ++batch) {
    auto loss = torch::zeros({1}, torch::TensorOptions(device_).dtype(torch::kDouble));
    const auto rows = rows_of([&](int64_t first, int64_t count) {
      return corpus_.held_out_rows(batch * config_.batch + first, count, total, config_.context);
    });
    for (const auto& part : rows.mine.tensor_split(config_.accumulate)) { // as in a step
      loss += shared_loss(part, rows.num_predicted);
    }
    sum += average(loss)[0]; // of each batch, so that a signal is heard after it
  }
  return sum / kValidationBatches;
}

std::string Trainer::generate(const std::string& prompt, int64_t count) {
  return sample(
      model_, prompt,
      {.count = count,
       .seed = static_cast<uint64_t>(config_.seed),
       .context = config_.context,
       .device = device_,
       .keeps_text = mesh_.data_rank == 0,
       .stop = [this] {
         average(torch::zeros({0}, device_));
         return stop_ != 0;
       }});
}

void Trainer::load_pretrained(const std::string& folder) {
  cli::load_pretrained(model_, folder);
}

StateDict Trainer::state_dict() {
  StateDict state;
  state.insert_all(get_model_state_dict(model_, {.ignore_frozen_params = true}), "model.");
  state.insert_all(get_optimizer_state_dict(model_, *optimizer_), "optim.");
  if (scaler_.is_enabled()) {
    const auto scaler = scaler_.state();
    state.insert("scaler.scale", scaler.scale);
    state.insert("scaler.growth_tracker", scaler.growth_tracker);
  }
  return state;
}

void Trainer::set_state_dict(const StateDict& state) {
  // `load` has already filled the model's own tensors. An optimizer that has not stepped has no
  // tensors yet, so its state must be set.
  set_optimizer_state_dict(model_, *optimizer_, state.below("optim."));
  if (scaler_.is_enabled()) {
    scaler_.load_state(
        {.scale = std::get<double>(state.at("scaler.scale")),
         .growth_tracker = std::get<int64_t>(state.at("scaler.growth_tracker"))});
  }
}

Trainer::Rows Trainer::rows_of(
    const std::function<torch::Tensor(int64_t first, int64_t count)>& read) const {
  const auto first_of = [&](int64_t rank) {
    return config_.batch * rank / mesh_.shape.data_ranks();
  };
  const auto first = first_of(mesh_.data_rank);
  const auto count = first_of(mesh_.data_rank + 1) - first; // not the same on all ranks
  if (!corpus_.has_flags()) {
    return {read(first, count), config_.batch * config_.context};
  }
  // Every rank reads the whole batch, which is small, so that none has to ask the others.
  const auto all = read(0, config_.batch);
  const auto predicted = all.narrow(1, 1, config_.context).bitwise_and(kIsGiven).eq(0);
  return {all.narrow(0, first, count), predicted.sum().item<int64_t>()};
}

torch::Tensor Trainer::shared_loss(const torch::Tensor& part, int64_t num_predicted) {
  // A batch of padding predicts nothing: its loss is 0, not NaN.
  const auto tokens = static_cast<double>(std::max<int64_t>(1, num_predicted));
  return loss_sum(model_, part.to(device_), corpus_.has_flags()) *
         (static_cast<double>(mesh_.shape.data_ranks()) / tokens);
}

std::vector<double> Trainer::average(const torch::Tensor& values) {
  const auto asked = asked_();
  const auto signals = torch::tensor(
      {asked == SIGINT ? 1.0 : 0.0, asked == SIGTERM ? 1.0 : 0.0},
      torch::TensorOptions(device_).dtype(torch::kDouble));
  const auto shared = torch::cat({values.to(torch::kDouble), signals});
  default_group().all_reduce(shared, ReduceOp::Avg);
  const auto host = shared.to(torch::kCPU);
  std::vector<double> result(host.data_ptr<double>(), host.data_ptr<double>() + host.numel());
  stop_ = result[result.size() - 2] > 0 ? SIGINT : result.back() > 0 ? SIGTERM : stop_;
  return result;
}

std::string Trainer::first_non_finite(bool gradients) const {
  const auto params = model_->named_parameters();
  auto first = static_cast<int64_t>(params.size());
  for (int64_t i = first - 1; i >= 0; --i) {
    const auto& param = params[static_cast<size_t>(i)].value();
    const auto values = gradients ? param.grad() : param.detach();
    first = values.defined() && !values.isfinite().all().item<bool>() ? i : first;
  }
  const auto shared = torch::full({1}, first, torch::TensorOptions(device_).dtype(torch::kLong));
  default_group().all_reduce(shared, ReduceOp::Min);
  const auto found = static_cast<size_t>(shared.item<int64_t>());
  return found < params.size() ? params[found].key() : "";
}

} // namespace fsdp::cli
