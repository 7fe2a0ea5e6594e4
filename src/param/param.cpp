#include <fsdp/param.h>

#include <fsdp/extension.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <utility>

#include "param/fsdp_param.h"
#include "param/param_placement.h"

namespace fsdp {

namespace {

detail::FSDPParam& managed(const at::Tensor& param, const char* function) {
  auto* found = param.defined() ? detail::FSDPParam::find(param) : nullptr;
  TORCH_CHECK_VALUE(
      found, "[", function, "] this tensor is not a parameter that fully_shard manages");
  return *found;
}

/// Torch keeps one post-accumulate-grad hook per tensor. This one calls a list of hooks.
struct PostAccumulateHooks : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor& tensor) override {
    const auto now = hooks; // a copy, because a hook may remove itself
    for (const auto& [id, hook] : now) {
      hook(tensor);
    }
  }

  std::map<int, std::function<void(const at::Tensor&)>> hooks;
  int next_id = 0;
};

detail::TensorSpec placement(const at::Tensor& param, const char* function) {
  auto spec = param.defined() ? detail::placement_of(param) : std::nullopt;
  TORCH_CHECK_VALUE(
      spec, "[", function,
      "] this tensor is not a parameter that fully_shard manages or parallelize_module divided");
  return *std::move(spec);
}

} // namespace

DTensor as_dtensor(const at::Tensor& param) {
  auto spec = placement(param, "as_dtensor");
  const auto* found = detail::FSDPParam::find(param);
  // If the user replaced the tensor's content, the new content counts, as at the next gather.
  const auto local = found && !found->was_replaced() ? found->sharded() : param.detach();
  return DTensor::from_local(local, spec.mesh, std::move(spec.placements), std::move(spec.sizes));
}

DTensor as_dtensor_grad(const at::Tensor& param) {
  auto spec = placement(param, "as_dtensor_grad");
  TORCH_CHECK_VALUE(
      param.grad().defined(), "[as_dtensor_grad] parameter '", detail::name_of(param),
      "' has no gradient");
  return DTensor::from_local(
      param.grad(), spec.mesh, std::move(spec.placements), std::move(spec.sizes));
}

void set_all_gather_extension(
    const at::Tensor& param, std::shared_ptr<AllGatherExtension> extension) {
  auto& found = managed(param, "set_all_gather_extension");
  TORCH_CHECK_VALUE(
      found.face() == detail::Face::Sharded, "[set_all_gather_extension] parameter '", found.name(),
      "' is unsharded; reshard() its module first");
  found.extension = std::move(extension);
}

RemovableHandle register_post_accumulate_grad_hook(
    const at::Tensor& param, std::function<void(const at::Tensor&)> hook) {
  TORCH_CHECK_VALUE(
      param.defined() && param.is_leaf(),
      "[register_post_accumulate_grad_hook] only leaf tensors accumulate gradients");
  namespace impl = torch::autograd::impl;
  auto* hooks = dynamic_cast<PostAccumulateHooks*>(impl::post_acc_grad_hooks(param).get());
  if (!hooks) {
    auto made = std::make_unique<PostAccumulateHooks>();
    hooks = made.get();
    impl::set_post_acc_grad_hooks(param, std::move(made));
  }
  const int id = hooks->next_id++;
  hooks->hooks.emplace(id, std::move(hook));
  return RemovableHandle([weak = c10::weak_intrusive_ptr(param.getIntrusivePtr()), id] {
    if (const auto alive = weak.lock()) {
      auto& installed = impl::post_acc_grad_hooks(at::Tensor(alive));
      if (auto* list = dynamic_cast<PostAccumulateHooks*>(installed.get())) {
        list->hooks.erase(id);
      }
    }
  });
}

} // namespace fsdp
