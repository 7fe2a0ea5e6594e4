#include "optim/fused_adamw.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>

namespace fsdp::detail {

void FusedAdamW::add(const Update& update, const Moments& moments) {
  const auto prepare = [&](const char* name, at::Tensor& tensor) {
    if (!tensor.defined()) {
      tensor = at::zeros_like(update.param);
    }
    check_state(optimizer_, update, name, tensor);
  };
  prepare("exp_avg", moments.exp_avg);
  prepare("exp_avg_sq", moments.exp_avg_sq);
  const auto device = update.param.device();
  const Key key{
      update.group, update.param.scalar_type(), device.type(), device.index(), moments.step};
  auto& bucket = buckets_[key];
  if (moments.max_exp_avg_sq) {
    prepare("max_exp_avg_sq", *moments.max_exp_avg_sq);
    bucket.lists.add(
        update.param, update.grad, {&moments.exp_avg, &moments.exp_avg_sq, moments.max_exp_avg_sq});
  } else {
    bucket.lists.add(update.param, update.grad, {&moments.exp_avg, &moments.exp_avg_sq});
  }
  bucket.steps.push_back(&moments.step);
}

void FusedAdamW::run(const OptionsOf& options_of) {
  for (auto& [key, bucket] : buckets_) {
    const auto options = options_of(std::get<0>(key));
    const auto step = std::get<4>(key) + 1;
    bucket.lists.run([&](const KernelLists::Lists& lists) {
      const auto& params = lists[0];
      const auto count =
          at::full({}, step, at::TensorOptions(at::kFloat).device(params[0].device()));
      at::_fused_adamw_(
          params, lists[1], lists[2], lists[3],
          options.amsgrad() ? at::TensorList(lists[4]) : at::TensorList(),
          std::vector(params.size(), count), options.lr(), std::get<0>(options.betas()),
          std::get<1>(options.betas()), options.weight_decay(), options.eps(), options.amsgrad(),
          /*maximize=*/false);
    });
    for (auto* count : bucket.steps) {
      *count = step;
    }
  }
}

} // namespace fsdp::detail
