#include <fsdp/optim.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>

#include <map>
#include <tuple>

#include "optim/kernel_lists.h"
#include "optim/update.h"
#include "runtime/range.h"

namespace fsdp::optim {
namespace {

constexpr auto kSgdName = "fsdp::optim::SGD";
using SgdState = torch::optim::SGDParamState;
using torch::optim::SGDOptions;

/// Parameters of the same group, dtype and device. Either all of them start their momentum in this
/// step or none.
struct SgdBucket {
  detail::KernelLists lists;
  // New momentum buffers. They enter the state after the kernel has filled them, because the step
  // may throw before that.
  std::vector<std::pair<SgdState*, at::Tensor>> started;
};
using SgdKey = std::tuple<std::size_t, at::ScalarType, at::DeviceType, at::DeviceIndex, bool>;

void step_unfused(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList momentum,
    const SGDOptions& options,
    bool is_first_step) {
  auto directions = grads.vec();
  if (options.weight_decay() != 0) {
    directions = at::_foreach_add(directions, params, options.weight_decay());
  }
  if (!momentum.empty()) {
    if (is_first_step) {
      at::_foreach_copy_(momentum, directions);
    } else {
      at::_foreach_mul_(momentum, options.momentum());
      at::_foreach_add_(momentum, directions, 1 - options.dampening());
    }
    directions = options.nesterov() ? at::_foreach_add(directions, momentum, options.momentum())
                                    : momentum.vec();
  }
  at::_foreach_add_(params, directions, -options.lr());
}

void run(SgdBucket& bucket, const SGDOptions& options, bool is_first_step) {
  bucket.lists.run([&](const detail::KernelLists::Lists& lists) {
    const auto& params = lists[0];
    const auto momentum = lists.size() > 2 ? at::TensorList(lists[2]) : at::TensorList();
    // On the CPU the fused kernel does not update most elements of such parameters: pytorch#191763.
    if (params[0].is_cpu() && at::isReducedFloatingType(params[0].scalar_type())) {
      step_unfused(params, lists[1], momentum, options, is_first_step);
      return;
    }
    at::_fused_sgd_(
        params, lists[1], momentum, options.weight_decay(), options.momentum(), options.lr(),
        options.dampening(), options.nesterov(), /*maximize=*/false, is_first_step);
  });
}

} // namespace

at::Tensor SGD::step(LossClosure closure) {
  auto loss = detail::loss_of(closure);
  const detail::Range range("optimizer_step");
  at::NoGradGuard no_grad;
  const auto options = [&](std::size_t group) -> const auto& {
    return static_cast<const SGDOptions&>(param_groups_[group].options());
  };
  std::map<SgdKey, SgdBucket> buckets;
  auto last = buckets.end(); // consecutive parameters mostly share a bucket
  for (const auto& update : detail::find_updates(kSgdName, param_groups_)) {
    const auto& param = update.param;
    const auto device = param.device();
    const auto bucket = [&](bool is_first_step) -> SgdBucket& {
      const SgdKey key{
          update.group, param.scalar_type(), device.type(), device.index(), is_first_step};
      if (last == buckets.end() || last->first != key) {
        last = buckets.try_emplace(key).first;
      }
      return last->second;
    };
    if (options(update.group).momentum() == 0) {
      bucket(false).lists.add(param, update.grad, {});
      continue;
    }
    auto& slot = state_[param.unsafeGetTensorImpl()];
    if (!slot) {
      slot = std::make_unique<SgdState>();
    }
    auto& state = static_cast<SgdState&>(*slot);
    if (state.momentum_buffer().defined()) {
      detail::check_state(kSgdName, update, "momentum_buffer", state.momentum_buffer());
      bucket(false).lists.add(param, update.grad, {&state.momentum_buffer()});
    } else {
      auto momentum = at::empty_like(param);
      bucket(true).lists.add(param, update.grad, {&momentum});
      bucket(true).started.emplace_back(&state, momentum);
    }
  }
  for (auto& [key, bucket] : buckets) {
    run(bucket, options(std::get<0>(key)), std::get<4>(key));
    for (auto& [state, momentum] : bucket.started) {
      state->momentum_buffer(momentum);
    }
  }
  return loss;
}

} // namespace fsdp::optim
