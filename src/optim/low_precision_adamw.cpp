#include <fsdp/low_precision_adamw.h>

#include <ATen/core/grad_mode.h>
#include <torch/optim/serialize.h>

#include <memory>
#include <utility>

#include "optim/archive.h"
#include "optim/low_precision_step.h"
#include "optim/update.h"
#include "param/param_placement.h"
#include "runtime/range.h"

namespace fsdp::optim {

namespace {

using Options = LowPrecisionAdamWOptions;
using State = LowPrecisionAdamWParamState;
using detail::Update;

const Options& adamw_options_of(const torch::optim::OptimizerParamGroup& group) {
  return detail::options_of<Options>(detail::kLowPrecisionAdamW, group);
}

/// Makes the moments that are not there yet. Throws ValueError if the update cannot be made.
void prepare(const Update& update, State& state, const Options& options) {
  detail::check_param(update.param, update.group, update.index);
  for (const auto& moment : detail::moments_of(state)) {
    if (!moment.values.defined()) {
      moment.make(update.param, options.moments());
    }
    const auto* name = moment.is_square ? "exp_avg_sq" : "exp_avg";
    const auto dtype = moment.values.scalar_type();
    TORCH_CHECK_VALUE(
        dtype == options.moments(), "[", detail::kLowPrecisionAdamW, "] ", name, " of parameter ",
        update.index, " of group ", update.group, " is in ", dtype, ", but the option moments is ",
        options.moments(), ". Set it back, or drop the state with state().clear()");
    detail::check_state(detail::kLowPrecisionAdamW, update, name, moment.values, dtype);
  }
}

} // namespace

// ------------------------------------------------------------ Options and state

void Options::serialize(torch::serialize::OutputArchive& archive) const {
  using torch::IValue;
  archive.write("lr", IValue(lr()));
  archive.write("betas", IValue(betas()));
  archive.write("eps", IValue(eps()));
  archive.write("weight_decay", IValue(weight_decay()));
  archive.write("moments", IValue(static_cast<int64_t>(moments())));
  archive.write("stochastic_rounding", IValue(stochastic_rounding()));
  archive.write("seed", IValue(seed()));
}

void Options::serialize(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* name) { return detail::read_value(archive, name); };
  lr(read("lr").toDouble());
  betas(read("betas").to<Betas>());
  eps(read("eps").toDouble());
  weight_decay(read("weight_decay").toDouble());
  moments(static_cast<at::ScalarType>(read("moments").toInt()));
  stochastic_rounding(read("stochastic_rounding").toBool());
  seed(read("seed").toInt());
}

double Options::get_lr() const {
  return lr();
}

void Options::set_lr(double lr) {
  this->lr(lr);
}

void State::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", torch::IValue(step()));
  detail::write_tensor(archive, "exp_avg", exp_avg());
  detail::write_tensor(archive, "exp_avg_sq", exp_avg_sq());
  detail::write_tensor(archive, "exp_avg_scale", exp_avg_scale());
  detail::write_tensor(archive, "exp_avg_sq_scale", exp_avg_sq_scale());
}

void State::serialize(torch::serialize::InputArchive& archive) {
  step(detail::read_value(archive, "step").toInt());
  detail::read_tensor(archive, "exp_avg", exp_avg());
  detail::read_tensor(archive, "exp_avg_sq", exp_avg_sq());
  detail::read_tensor(archive, "exp_avg_scale", exp_avg_scale());
  detail::read_tensor(archive, "exp_avg_sq_scale", exp_avg_sq_scale());
}

// ------------------------------------------------------------ The optimizer

LowPrecisionAdamW::LowPrecisionAdamW(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, const Options& defaults)
    : Optimizer(
          std::vector<torch::optim::OptimizerParamGroup>(), std::make_unique<Options>(defaults)) {
  detail::check(defaults);
  for (const auto& group : groups) {
    add_param_group(group);
  }
}

LowPrecisionAdamW::LowPrecisionAdamW(std::vector<at::Tensor> params, const Options& defaults)
    : LowPrecisionAdamW(
          std::vector{torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

void LowPrecisionAdamW::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  if (group.has_options()) {
    detail::check(adamw_options_of(group));
  }
  Optimizer::add_param_group(group);
  if (group.has_options()) {
    // Since torch 2.13 the line above replaces options of a type that torch does not know.
    param_groups_.back().set_options(group.options().clone());
  }
}

at::Tensor LowPrecisionAdamW::step(LossClosure closure) {
  auto loss = detail::loss_of(closure);
  const detail::Range range("optimizer_step");
  const at::NoGradGuard no_grad;
  const auto updates = detail::find_updates(detail::kLowPrecisionAdamW, param_groups_);
  const auto state_of = [&](const Update& update) -> State& {
    auto& slot = state_[update.param.unsafeGetTensorImpl()];
    if (!slot) {
      slot = std::make_unique<State>();
    }
    return static_cast<State&>(*slot);
  };
  for (const auto& update : updates) {
    const auto& options = adamw_options_of(param_groups_[update.group]);
    detail::check(options);
    prepare(update, state_of(update), options);
  }
  for (const auto& update : updates) {
    auto& state = state_of(update);
    detail::run(
        {.group = update.group,
         .index = update.index,
         .param = update.param,
         .grad = update.grad,
         .spec = detail::placement_of(update.param),
         .moments = detail::moments_of(state),
         .num_steps = state.step()},
        adamw_options_of(param_groups_[update.group]));
    state.step(state.step() + 1);
  }
  return loss;
}

void LowPrecisionAdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<State, Options>(archive, *this);
}

void LowPrecisionAdamW::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<State, Options>(archive, *this);
}

} // namespace fsdp::optim
