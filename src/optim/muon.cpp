#include <fsdp/muon.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/irange.h>
#include <torch/optim/serialize.h>

#include <unordered_set>
#include <utility>

#include "optim/archive.h"
#include "optim/fused_adamw.h"
#include "optim/matrix_steps.h"
#include "runtime/range.h"

namespace fsdp::optim {

namespace {

constexpr auto kMuonName = "Muon";

const MuonOptions& muon_options_of(const torch::optim::OptimizerParamGroup& group) {
  return detail::options_of<MuonOptions>(kMuonName, group);
}

} // namespace

// ------------------------------------------------------------ Options and state

void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  using torch::IValue;
  archive.write("lr", IValue(lr()));
  archive.write("weight_decay", IValue(weight_decay()));
  archive.write("momentum", IValue(momentum()));
  archive.write("nesterov", IValue(nesterov()));
  archive.write("ns_coefficients", IValue(ns_coefficients()));
  archive.write("eps", IValue(eps()));
  archive.write("ns_steps", IValue(ns_steps()));
  archive.write("match_rms_adamw", IValue(match_rms_adamw()));
  archive.write("ns_dtype", IValue(static_cast<int64_t>(ns_dtype())));
  archive.write("blocks", IValue(blocks()));
  archive.write("adamw", IValue(adamw()));
  archive.write("betas", IValue(betas()));
  archive.write("adamw_eps", IValue(adamw_eps()));
}

void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* name) { return detail::read_value(archive, name); };
  lr(read("lr").toDouble());
  weight_decay(read("weight_decay").toDouble());
  momentum(read("momentum").toDouble());
  nesterov(read("nesterov").toBool());
  ns_coefficients(read("ns_coefficients").to<Coefficients>());
  eps(read("eps").toDouble());
  ns_steps(read("ns_steps").toInt());
  match_rms_adamw(read("match_rms_adamw").toBool());
  ns_dtype(static_cast<at::ScalarType>(read("ns_dtype").toInt()));
  blocks(read("blocks").toInt());
  adamw(read("adamw").toBool());
  betas(read("betas").to<Betas>());
  adamw_eps(read("adamw_eps").toDouble());
}

double MuonOptions::get_lr() const {
  return lr();
}

void MuonOptions::set_lr(double lr) {
  this->lr(lr);
}

void MuonParamState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", torch::IValue(step()));
  detail::write_tensor(archive, "momentum_buffer", momentum_buffer());
  detail::write_tensor(archive, "exp_avg", exp_avg());
  detail::write_tensor(archive, "exp_avg_sq", exp_avg_sq());
}

void MuonParamState::serialize(torch::serialize::InputArchive& archive) {
  step(detail::read_value(archive, "step").toInt());
  detail::read_tensor(archive, "momentum_buffer", momentum_buffer());
  detail::read_tensor(archive, "exp_avg", exp_avg());
  detail::read_tensor(archive, "exp_avg_sq", exp_avg_sq());
}

// ------------------------------------------------------------ The optimizer

Muon::Muon(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, const MuonOptions& defaults)
    : Optimizer(
          std::vector<torch::optim::OptimizerParamGroup>(),
          std::make_unique<MuonOptions>(defaults)),
      matrices_(std::make_unique<detail::MatrixSteps>()) {
  detail::check_options(defaults);
  for (const auto& group : groups) {
    add_param_group(group);
  }
}

Muon::Muon(std::vector<at::Tensor> params, const MuonOptions& defaults)
    : Muon(std::vector{torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

Muon::~Muon() = default;

void Muon::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  if (group.has_options()) {
    detail::check_options(muon_options_of(group));
  }
  Optimizer::add_param_group(group);
  if (group.has_options()) {
    // Since torch 2.13 the line above replaces options of a type that torch does not know.
    param_groups_.back().set_options(group.options().clone());
  }
}

at::Tensor Muon::step(LossClosure closure) {
  auto loss = detail::loss_of(closure);
  const detail::Range range("optimizer_step");
  at::NoGradGuard no_grad;
  const auto options = [&](std::size_t group) -> const auto& {
    return muon_options_of(param_groups_[group]);
  };
  const auto updates = detail::find_updates(kMuonName, param_groups_);
  auto matrices = matrix_updates();
  matrices_->prepare(matrices);

  const auto state_of = [&](const detail::Update& update) -> auto& {
    auto& slot = state_[update.param.unsafeGetTensorImpl()];
    if (!slot) {
      slot = std::make_unique<MuonParamState>();
    }
    return static_cast<MuonParamState&>(*slot);
  };
  detail::FusedAdamW adamw(kMuonName);
  auto matrix = matrices.begin();
  for (const auto& update : updates) {
    auto& state = state_of(update);
    if (!options(update.group).updates_by_muon(update.param.dim())) {
      adamw.add(update, {state.step(), state.exp_avg(), state.exp_avg_sq()});
      continue;
    }
    if (!state.momentum_buffer().defined()) {
      state.momentum_buffer(at::zeros_like(update.param));
    }
    detail::check_state(kMuonName, update, "momentum_buffer", state.momentum_buffer());
    while (!matrix->param.is_same(update.param)) { // `matrix` has no gradient
      ++matrix;
    }
    matrix->momentum = state.momentum_buffer();
  }
  matrices_->run(matrices);
  adamw.run([&](std::size_t group) {
    const auto& from = options(group);
    return torch::optim::AdamWOptions(from.lr())
        .betas(from.betas())
        .eps(from.adamw_eps())
        .weight_decay(from.weight_decay());
  });
  return loss;
}

std::vector<detail::MatrixUpdate> Muon::matrix_updates() const {
  std::vector<detail::MatrixUpdate> matrices;
  std::unordered_set<const void*> seen;
  for (const auto group : c10::irange(param_groups_.size())) {
    const auto& options = muon_options_of(param_groups_[group]);
    const auto& params = param_groups_[group].params();
    for (const auto index : c10::irange(params.size())) {
      const auto& param = params[index];
      if (options.updates_by_muon(param.dim()) && seen.insert(param.unsafeGetTensorImpl()).second) {
        matrices.push_back(
            {.group = group,
             .index = index,
             .param = param,
             .grad = param.grad(),
             .spec = detail::placement_of(param),
             .options = &options});
      }
    }
  }
  return matrices;
}

void Muon::set_exchange_numel(int64_t numel) {
  matrices_->set_exchange_numel(numel);
}

void Muon::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
}

void Muon::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
}

} // namespace fsdp::optim
