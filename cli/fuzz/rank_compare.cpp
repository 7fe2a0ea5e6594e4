// How the sharded model is compared with the unsharded one.
#include <torch/torch.h>

#include <algorithm>

#include <fsdp/distributed.h>
#include <fsdp/param.h>
#include <fsdp/state_dict.h>

#include "cli/fuzz/rank_run.h"

namespace fsdp::cli::fuzz {

void RankRun::check(
    const char* kind,
    const std::string& name,
    const at::Tensor& actual,
    const at::Tensor& expected,
    double size) {
  ++num_comparisons_;
  const auto where = c10::str(name, " in step ", step_, " on rank ", rank_, ": ");
  if (actual.sizes() != expected.sizes() || actual.scalar_type() != expected.scalar_type()) {
    throw Difference(
        kind, c10::str(
                  where, actual.scalar_type(), actual.sizes(), " instead of ",
                  expected.scalar_type(), expected.sizes()));
  }
  if (actual.numel() == 0) {
    return;
  }
  const auto a = actual.to(torch::kDouble), e = expected.to(torch::kDouble);
  const auto error = (a - e).abs().max().item<double>();
  const auto limit = tolerance_ * (std::max(size, e.abs().max().item<double>()) + 1e-2);
  if (!(error <= limit)) { // also NaN
    throw Difference(kind, c10::str(where, "differs by ", error, "\n  is ", a, "\n  not ", e));
  }
}

at::Tensor RankRun::part_of(const at::Tensor& whole, const at::Tensor& param) const {
  const auto spread = as_dtensor(param);
  const auto& mesh = spread.device_mesh();
  const std::vector<Placement> replicated(mesh.ndim(), Replicate{});
  return DTensor::from_local(whole, mesh, replicated).redistribute(spread.placements()).to_local();
}

void RankRun::average_gradients(const std::vector<at::Tensor>& before) {
  std::vector<at::Tensor> flat;
  for (const auto& param : plain_params_) {
    const auto grad = param.grad();
    flat.push_back(torch::full({1}, grad.defined() ? 1.0 : 0.0, torch::kDouble));
    flat.push_back(
        grad.defined() ? grad.to(torch::kDouble).flatten()
                       : torch::zeros({param.numel()}, torch::kDouble));
  }
  auto all = torch::cat(flat);
  default_group().all_reduce(all, ReduceOp::Sum);
  int64_t at = 0;
  for (size_t i = 0; i < plain_params_.size(); ++i) {
    auto& param = plain_params_[i];
    const bool used = all[at].item<double>() > 0;
    const auto sum = all.slice(0, at + 1, at + 1 + param.numel());
    at += 1 + param.numel();
    auto grad =
        used ? (sum / case_.ranks).to(case_.dtype).view(param.sizes()).clone() : at::Tensor();
    if (before[i].defined()) {
      grad = grad.defined() ? before[i] + grad : before[i];
    }
    param.mutable_grad() = grad;
  }
}

void RankRun::compare_gradients() {
  double size = 0;
  for (const auto& param : plain_params_) {
    if (param.grad().defined() && param.numel() > 0) {
      size = std::max(size, param.grad().abs().max().item<double>());
    }
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto grad = params_[i].grad();
    auto& expected = plain_params_[i];
    if (!expected.grad().defined() && grad.defined() && may_be_zero_[i]) {
      expected.mutable_grad() = torch::zeros_like(expected);
    }
    if (grad.defined() != expected.grad().defined()) {
      throw Difference(
          grad.defined() ? "a gradient is there that should not be" : "a gradient is missing",
          c10::str(names_[i], " in step ", step_, " on rank ", rank_));
    }
    if (grad.defined()) {
      check("the gradients differ", names_[i], grad, part_of(expected.grad(), params_[i]), size);
    }
  }
}

void RankRun::compare_parameters() {
  for (size_t i = 0; i < params_.size(); ++i) {
    check(
        "the parameters differ", names_[i], as_dtensor(params_[i]).to_local(),
        part_of(plain_params_[i].detach(), params_[i]), 1);
    if (!params_[i].sizes().equals(as_dtensor(params_[i]).to_local().sizes())) {
      throw Difference("a parameter is whole at rest", names_[i]);
    }
  }
}

void RankRun::compare_wholes(int group) {
  const auto nodes = all_nodes(net_), plain = all_nodes(plain_);
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i]->block.group == group) {
      const auto expected = plain[i]->named_parameters(/*recurse=*/false);
      for (const auto& item : nodes[i]->named_parameters(/*recurse=*/false)) {
        const auto dtype = case_.groups[group].param_dtype.value_or(case_.dtype);
        check(
            "whole parameters differ", item.key(), item.value().detach(),
            expected[item.key()].detach().to(dtype), 1);
      }
    }
  }
}

void RankRun::compare_full_state() {
  const auto state = get_model_state_dict(net_, {.full_state_dict = true});
  if (rank_ == 0) {
    for (const auto& item : plain_->named_parameters()) {
      check(
          "the full state dict differs", item.key(), std::get<at::Tensor>(state.at(item.key())),
          item.value().detach(), 1);
    }
  }
}

} // namespace fsdp::cli::fuzz
