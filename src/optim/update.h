#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <optional>
#include <tuple>
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

/// The options of a group. Throws ValueError if they are those of another optimizer.
template <class Options>
const Options& options_of(const char* optimizer, const torch::optim::OptimizerParamGroup& group) {
  const auto* options = dynamic_cast<const Options*>(&group.options());
  TORCH_CHECK_VALUE(
      options, "[", optimizer, "] a parameter group has options of another optimizer; give it ",
      optimizer, "Options");
  return *options;
}

/// Throws ValueError with the name of an option and its value, unless it is good.
void check_option(
    const char* optimizer, const char* name, double value, bool is_good, const char* wanted);
/// The same, for betas of an average.
void check_betas(const char* optimizer, const std::tuple<double, double>& betas);

/// Throws ValueError if `state` does not fit the parameter. Its dtype is that of the parameter, or
/// `dtype`.
void check_state(
    const char* optimizer,
    const Update& update,
    const char* name,
    const at::Tensor& state,
    std::optional<at::ScalarType> dtype = {});

} // namespace fsdp::detail
