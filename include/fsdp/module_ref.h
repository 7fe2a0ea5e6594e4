#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <type_traits>

#include <fsdp/export.h>

namespace fsdp {

/// A reference to any module. Converts from a holder, a shared pointer, a reference or an
/// AnyModule.
class FSDP_API ModuleRef {
 public:
  // NOLINTBEGIN(google-explicit-constructor): callers pass a module in the form that they have
  template <class Contained>
  ModuleRef(const torch::nn::ModuleHolder<Contained>& holder) : ModuleRef(holder.ptr()) {}
  template <class M>
    requires std::is_base_of_v<torch::nn::Module, M>
  ModuleRef(const std::shared_ptr<M>& module) : module_(module.get()) {
    TORCH_CHECK_VALUE(module, "[fully_shard] the module is a null pointer");
  }
  ModuleRef(torch::nn::Module& module) : module_(&module) {}
  ModuleRef(const torch::nn::AnyModule& module) : ModuleRef(module.ptr()) {}
  // NOLINTEND(google-explicit-constructor)
  ModuleRef(std::nullptr_t) = delete;

  torch::nn::Module& operator*() const {
    return *module_;
  }
  torch::nn::Module* operator->() const {
    return module_;
  }
  bool is_by_call() const {
    return by_call_;
  }

 private:
  friend ModuleRef by_call(ModuleRef module);

  torch::nn::Module* module_;
  bool by_call_ = false;
};

/// Marks a module for fully_shard that cannot be hooked, because its type belongs to LibTorch or
/// another library: fully_shard(by_call(m)). Run it with fsdp::call(m, x) instead of m(x).
inline ModuleRef by_call(ModuleRef module) {
  module.by_call_ = true;
  return module;
}

} // namespace fsdp
