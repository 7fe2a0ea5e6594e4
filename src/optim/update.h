#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <vector>

namespace fsdp::detail {

/// A parameter that a step changes, and its gradient. Both refer to the optimizer's own tensors,
/// which saves their reference counting.
struct Update {
  std::size_t group;
  std::size_t index; // in the group
  const at::Tensor& param;
  const at::Tensor& grad;
};

/// Calls the closure with gradients enabled and returns its loss. Returns an undefined tensor if
/// there is no closure.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

/// Returns the parameters that have a gradient, each once even if it is listed twice. Throws
/// ValueError if a gradient is sparse or does not fit its parameter.
std::vector<Update> find_updates(
    const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups);

/// Throws ValueError if `state` does not fit the parameter.
void check_state(
    const char* optimizer, const Update& update, const char* name, const at::Tensor& state);

} // namespace fsdp::detail
