#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include <fsdp/export.h>
#include <fsdp/fully_shard.h>

namespace torch::optim {
class Optimizer;
}

namespace fsdp::optim {

/// Updates the parameters of each group while backward goes on to the next one. It is for offloaded
/// parameters: the host updates them, which takes long, while the device computes. A gradient is
/// freed right after its update.
///
///     fsdp::optim::AdamW adamw(model->parameters(), options);
///     fsdp::optim::StepInBackward updates(model, adamw);
///     ...
///     loss.backward();
///     updates.finish(); // instead of adamw.step() and adamw.zero_grad()
///
/// A thread updates the parameters that are in host memory. `finish` updates those on an
/// accelerator. The results are those of `adamw.step()` after backward, to the bit.
///
/// Every backward is a step, except those after `set_is_last_backward(false)` or
/// `set_requires_gradient_sync(false)`. Between backward and `finish`, nobody else may use the
/// optimizer, the parameters or their gradients. A parameter's gradient must come from the forward
/// of its module alone: a penalty on the shards could add to it during the update. What needs all
/// gradients before the first update cannot be combined with this: clip_grad_norm_, GradScaler,
/// Muon, optimizers with a closure.
///
/// If backward or `finish` throws, some parameters are updated and others are not, perhaps on this
/// rank alone. Call `discard`, then load a checkpoint on all ranks.
class FSDP_API StepInBackward {
 public:
  using BeforeUpdate = std::function<void(const std::vector<at::Tensor>& params)>;

  /// `module` is the root of the sharded modules. The optimizer must have its parameters already,
  /// and must outlive this object. `before_update` is called before each update with its
  /// parameters: those of one group by the thread, all others together by `finish`. It may look at
  /// their gradients and change them. It must not communicate, because backward does so at the same
  /// time. Throws ValueError if the optimizer cannot step on some parameters alone, if it has none
  /// of the module's, or if the module has a set_reduced_grads_hook already.
  StepInBackward(
      ModuleRef module,
      torch::optim::Optimizer& optimizer,
      const BeforeUpdate& before_update = nullptr);
  /// Waits for updates that have begun.
  ~StepInBackward();
  StepInBackward(const StepInBackward&) = delete;
  StepInBackward& operator=(const StepInBackward&) = delete;

  /// Waits until all parameters that have a gradient are updated, and clears their gradients. Call
  /// it after each backward that is a step. If an update failed, throws its error.
  void finish();
  /// Leaves out the updates that have not begun, and clears all gradients. Call it after an error.
  void discard();

 private:
  class Updates;
  FSDPModule module_;
  std::shared_ptr<Updates> updates_;
};

} // namespace fsdp::optim
