#include <fsdp/optim.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>

#include <map>
#include <tuple>

#include "optim/kernel_lists.h"
#include "optim/update.h"
#include "runtime/range.h"

namespace fsdp::optim {
namespace {

constexpr auto kAdamWName = "fsdp::optim::AdamW";
using AdamWState = torch::optim::AdamWParamState;

/// Parameters of the same group, dtype, device and step count, so that they share one step tensor.
struct AdamWBucket {
  detail::KernelLists lists;
  std::vector<AdamWState*> states;
};
using AdamWKey = std::tuple<std::size_t, at::ScalarType, at::DeviceType, at::DeviceIndex, int64_t>;

void add(AdamWBucket& bucket, const detail::Update& update, AdamWState& state, bool amsgrad) {
  const auto prepare = [&](const char* name, at::Tensor& tensor) {
    if (!tensor.defined()) {
      tensor = at::zeros_like(update.param);
    }
    detail::check_state(kAdamWName, update, name, tensor);
  };
  prepare("exp_avg", state.exp_avg());
  prepare("exp_avg_sq", state.exp_avg_sq());
  if (amsgrad) {
    prepare("max_exp_avg_sq", state.max_exp_avg_sq());
    bucket.lists.add(
        update.param, update.grad,
        {&state.exp_avg(), &state.exp_avg_sq(), &state.max_exp_avg_sq()});
  } else {
    bucket.lists.add(update.param, update.grad, {&state.exp_avg(), &state.exp_avg_sq()});
  }
  bucket.states.push_back(&state);
}

void run(AdamWBucket& bucket, const torch::optim::AdamWOptions& options) {
  const auto step = bucket.states[0]->step() + 1;
  bucket.lists.run([&](const detail::KernelLists::Lists& lists) {
    const auto& params = lists[0];
    const auto count = at::full({}, step, at::TensorOptions(at::kFloat).device(params[0].device()));
    at::_fused_adamw_(
        params, lists[1], lists[2], lists[3],
        options.amsgrad() ? at::TensorList(lists[4]) : at::TensorList(),
        std::vector(params.size(), count), options.lr(), std::get<0>(options.betas()),
        std::get<1>(options.betas()), options.weight_decay(), options.eps(), options.amsgrad(),
        /*maximize=*/false);
  });
  for (auto* state : bucket.states) {
    state->step(step);
  }
}

} // namespace

at::Tensor AdamW::step(LossClosure closure) {
  auto loss = detail::loss_of(closure);
  const detail::Range range("optimizer_step");
  at::NoGradGuard no_grad;
  const auto options = [&](std::size_t group) -> const auto& {
    return static_cast<const torch::optim::AdamWOptions&>(param_groups_[group].options());
  };
  std::map<AdamWKey, AdamWBucket> buckets;
  for (const auto& update : detail::find_updates(kAdamWName, param_groups_)) {
    const auto& param = update.param;
    auto& slot = state_[param.unsafeGetTensorImpl()];
    if (!slot) {
      slot = std::make_unique<AdamWState>();
    }
    auto& state = static_cast<AdamWState&>(*slot);
    const auto device = param.device();
    const AdamWKey key{
        update.group, param.scalar_type(), device.type(), device.index(), state.step()};
    add(buckets[key], update, state, options(update.group).amsgrad());
  }
  for (auto& [key, bucket] : buckets) {
    run(bucket, options(std::get<0>(key)));
  }
  return loss;
}

} // namespace fsdp::optim
