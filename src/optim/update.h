#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <vector>

namespace fsdp::detail {

/// A parameter that a step changes, and its gradient: the optimizer's own
/// tensors, not counted once more.
struct Update {
  std::size_t group;
  std::size_t index; // in the group
  const at::Tensor& param;
  const at::Tensor& grad;
};

/// What the closure returns, computed with gradients; undefined without one.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

/// The parameters that have a gradient, each once however often it is listed.
/// Throws ValueError for a gradient that is sparse or does not fit.
std::vector<Update> find_updates(
    const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups);

/// Throws ValueError if `state` does not fit the parameter.
void check_state(
    const char* optimizer, const Update& update, const char* name, const at::Tensor& state);

} // namespace fsdp::detail
