#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/export.h>
#include <fsdp/hooked.h>
#include <fsdp/placement.h>

namespace fsdp {

/// Any module: a holder, a shared pointer or a reference.
class ModuleRef {
 public:
  template <class Contained>
  ModuleRef(const torch::nn::ModuleHolder<Contained>& holder) // NOLINT
      : ModuleRef(holder.ptr()) {}
  template <class M>
    requires std::is_base_of_v<torch::nn::Module, M>
  ModuleRef(const std::shared_ptr<M>& module) : module_(module.get()) { // NOLINT
    TORCH_CHECK_VALUE(module, "[fully_shard] the module is a null pointer");
  }
  ModuleRef(torch::nn::Module& module) : module_(&module) {} // NOLINT
  ModuleRef(std::nullptr_t) = delete;

  torch::nn::Module& operator*() const {
    return *module_;
  }
  torch::nn::Module* operator->() const {
    return module_;
  }

 private:
  torch::nn::Module* module_;
};

struct FullyShardOptions {
  /// One axis; by default all ranks of the world.
  std::optional<DeviceMesh> mesh = {};
  /// Free the parameters after forward and gather them again for backward.
  /// No value: yes, except for the outermost module, whose backward begins at
  /// once.
  std::optional<bool> reshard_after_forward = {};
  /// The dim to shard each parameter along; 0 without a function or value.
  std::function<std::optional<Shard>(const std::string& fqn, const at::Tensor&)>
      shard_placement_fn = {};
  /// Left alone completely.
  std::vector<at::Tensor> ignored_params = {};
};

/// A cheap handle to a sharded module. Throws once the module is gone.
class FSDP_API FSDPModule {
 public:
  /// Throws if the module is not sharded.
  static FSDPModule of(ModuleRef module);

  /// Gathers this module's own parameters, or frees them.
  void unshard();
  void reshard();
  /// After an exception that was caught outside: nothing is left pending.
  /// Exceptions in forward or backward need no such call.
  void reset_iter_state();
  /// False: backward leaves the gradients unreduced; the next backward adds.
  void set_requires_gradient_sync(bool requires_gradient_sync, bool recurse = true);
  void set_reshard_after_forward(bool reshard_after_forward, bool recurse = true);
  void set_is_last_backward(bool is_last_backward);
  /// Divide gradients by this instead of the number of ranks.
  void set_gradient_divide_factor(double factor);
  void set_force_sum_reduction_for_comms(bool force_sum);

  explicit FSDPModule(std::weak_ptr<detail::FSDPState> state);

 private:
  std::shared_ptr<detail::FSDPState> state() const;
  std::vector<std::shared_ptr<detail::FSDPState>> states(bool recurse) const;

  std::weak_ptr<detail::FSDPState> state_;
};

FSDP_API bool is_fsdp_module(ModuleRef module);

/// Shards the parameters of `module` that no fully_shard below it has taken:
/// call it bottom-up. They are gathered around each forward and backward, and
/// their gradients reduced; the tensors stay the same objects, so optimizers
/// made before or after work. The module must be hooked (FSDP_MODULE). Not
/// collective by itself; every rank must make the same calls.
FSDP_API FSDPModule fully_shard(ModuleRef module, const FullyShardOptions& options = {});

} // namespace fsdp
