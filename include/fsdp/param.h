#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

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

/// Gradients of shards to which no backward will add before the next step of an optimizer.
struct ReducedGrads {
  std::vector<at::Tensor> params; // `grad()` of each is set
  /// Blocks until the gradients are written: they may still be on their way from the device.
  std::function<void()> wait;
  /// Hold it until the parameters are updated. Until then, whoever else uses them gets an error.
  std::shared_ptr<void> in_use;
};
using ReducedGradsHook = std::function<void(ReducedGrads)>;

} // namespace fsdp
