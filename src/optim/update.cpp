#include "optim/update.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/irange.h>

#include <string>

namespace fsdp::detail {
namespace {

bool fits(const at::Tensor& tensor, const at::Tensor& param, at::ScalarType dtype) {
  return tensor.sizes() == param.sizes() && tensor.scalar_type() == dtype &&
         tensor.device() == param.device() && tensor.layout() == at::kStrided;
}

std::string text_of(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), tensor.sizes(), " on ", tensor.device());
}

std::string text_of(const char* optimizer, const Update& update) {
  return c10::str(
      "[", optimizer, "] parameter ", update.index, " of group ", update.group, ", ",
      text_of(update.param), ",");
}

void check_grad(const char* optimizer, const Update& update) {
  TORCH_CHECK_VALUE(
      update.grad.layout() == at::kStrided, text_of(optimizer, update),
      " has a gradient of layout ", update.grad.layout(),
      "; only dense ones can be used. Make an embedding without the option `sparse`.");
  TORCH_CHECK_VALUE(
      fits(update.grad, update.param, update.param.scalar_type()), text_of(optimizer, update),
      " has a gradient of another kind, ", text_of(update.grad),
      ". Call zero_grad() after sharding, moving or casting a module, and reshard() one that is "
      "still unsharded before the step.");
}

} // namespace

at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  c10::AutoGradMode with_gradients(true);
  return closure ? closure() : at::Tensor();
}

std::vector<Update> find_updates(
    const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::size_t num_params = 0;
  for (const auto& group : groups) {
    num_params += group.params().size();
  }
  std::vector<Update> updates;
  updates.reserve(num_params);
  ska::flat_hash_set<const void*> seen;
  seen.reserve(num_params);
  for (const auto group : c10::irange(groups.size())) {
    const auto& params = groups[group].params();
    for (const auto index : c10::irange(params.size())) {
      const auto& param = params[index];
      const auto& grad = param.grad();
      if (!grad.defined() || !seen.insert(param.unsafeGetTensorImpl()).second) {
        continue;
      }
      updates.push_back({group, index, param, grad});
      check_grad(optimizer, updates.back());
    }
  }
  return updates;
}

void check_option(
    const char* optimizer, const char* name, double value, bool is_good, const char* wanted) {
  TORCH_CHECK_VALUE(is_good, "[", optimizer, "] ", name, " is ", value, ", not ", wanted);
}

void check_betas(const char* optimizer, const std::tuple<double, double>& betas) {
  for (const auto beta : {std::get<0>(betas), std::get<1>(betas)}) {
    check_option(optimizer, "a beta", beta, beta >= 0 && beta < 1, "from 0 to below 1");
  }
}

void check_state(
    const char* optimizer,
    const Update& update,
    const char* name,
    const at::Tensor& state,
    std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_VALUE(
      fits(state, update.param, dtype.value_or(update.param.scalar_type())),
      text_of(optimizer, update), " has a state of another kind: ", name, " is ", text_of(state),
      ". The parameter was sharded, moved or cast after the state was made or loaded. Do that "
      "first, or drop the old state with state().clear().");
}

} // namespace fsdp::detail
