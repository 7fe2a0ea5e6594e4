#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include <fsdp/dtensor.h>
#include <fsdp/export.h>

namespace fsdp {

/// Returns this rank's shard of a parameter as a DTensor that shares its memory, whether the
/// parameter is gathered at the moment or not. For parameters that fully_shard manages or
/// parallelize_module has divided. Throws ValueError for other tensors.
FSDP_API DTensor as_dtensor(const at::Tensor& param);
/// Does the same for the parameter's gradient. Throws ValueError if there is none.
FSDP_API DTensor as_dtensor_grad(const at::Tensor& param);

/// Removes a hook. The hook stays if the handle is destroyed.
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

/// Calls `hook(param)` each time a backward has set or added to `param.grad()`; for a sharded
/// parameter, after the reduction. The hook may step an optimizer and clear the gradient.
FSDP_API RemovableHandle register_post_accumulate_grad_hook(
    const at::Tensor& param, std::function<void(const at::Tensor&)> hook);

} // namespace fsdp
