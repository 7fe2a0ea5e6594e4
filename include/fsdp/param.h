#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include <fsdp/dtensor.h>
#include <fsdp/export.h>

namespace fsdp {

/// How a parameter that fully_shard manages, or parallelize_module has divided,
/// is sharded; shares its shard, whether it is unsharded at the moment or not.
FSDP_API DTensor as_dtensor(const at::Tensor& param);
/// The same of its gradient, which must be there.
FSDP_API DTensor as_dtensor_grad(const at::Tensor& param);

/// Takes a hook away; may be dropped.
class FSDP_API RemovableHandle {
 public:
  explicit RemovableHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  void remove() {
    if (remove_) {
      std::exchange(remove_, nullptr)();
    }
  }

 private:
  std::function<void()> remove_;
};

/// Calls `hook(param)` each time that `param.grad()` has got its value for a
/// backward: for a sharded parameter, after the reduction. An optimizer may
/// step there and clear the gradient.
FSDP_API RemovableHandle register_post_accumulate_grad_hook(
    const at::Tensor& param, std::function<void(const at::Tensor&)> hook);

} // namespace fsdp
