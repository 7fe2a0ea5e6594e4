#include <fsdp/activation_checkpointing.h>
#include <fsdp/hooked.h>

#include <unordered_set>

#include "module/module_tree.h"

namespace fsdp {

namespace detail {

WeakModule::WeakModule(const torch::nn::Module& module)
    : owned_(module.weak_from_this()),
      not_owned_(owned_.expired() ? &module : nullptr),
      type_(&typeid(module)) {}

std::shared_ptr<const torch::nn::Module> WeakModule::lock() const {
  if (not_owned_) {
    return {std::shared_ptr<void>(), not_owned_};
  }
  auto module = owned_.lock();
  TORCH_CHECK(
      module, "[checkpoint] backward has to recompute ", name(),
      ", but this module is gone; keep it until backward has run");
  return module;
}

std::string WeakModule::name() const {
  const auto owned = owned_.lock();
  const auto* module = owned ? owned.get() : not_owned_;
  const auto state = module ? state_of(*module) : nullptr;
  const auto type = type_name(*type_);
  return state && state->name() != type ? "'" + state->name() + "' (" + type + ")" : type;
}

void refuse_arguments(const torch::nn::Module& module) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "[checkpoint] ", WeakModule(module).name(),
      " takes an argument that cannot be kept for a second call: it cannot be copied, or refers to "
      "memory elsewhere (ArrayRef, string_view); take a container by value, or call "
      "fsdp::checkpoint on a part of it");
}

} // namespace detail

namespace {

Hookable& hooked(torch::nn::Module& module) {
  auto* hookable = dynamic_cast<Hookable*>(&module);
  TORCH_CHECK_VALUE(
      hookable, "[apply_activation_checkpointing] ", detail::type_name(module),
      " is not hooked, so its calls cannot be intercepted. Declare its holder with FSDP_MODULE "
      "instead of TORCH_MODULE, take the one of fsdp::nn, or call it by fsdp::checkpoint(module, "
      "args...)");
  TORCH_CHECK_VALUE(
      hookable->fsdp_has_forward(), "[apply_activation_checkpointing] ", detail::type_name(module),
      " has no forward; choose its elements");
  return *hookable;
}

} // namespace

void apply_activation_checkpointing(ModuleRef module, const ActivationCheckpointOptions& options) {
  hooked(*module).fsdp_recompute = options;
}

size_t apply_activation_checkpointing(
    ModuleRef root,
    const std::function<bool(const std::string& name, torch::nn::Module& module)>& choose,
    const ActivationCheckpointOptions& options) {
  TORCH_CHECK_VALUE(choose, "[apply_activation_checkpointing] needs a function that chooses");
  std::unordered_set<Hookable*> chosen; // all modules are checked before one is changed
  detail::walk(*root, [&](const std::string& name, torch::nn::Module& module) {
    if (choose(name, module)) {
      chosen.insert(&hooked(module));
    }
  });
  for (auto* each : chosen) {
    each->fsdp_recompute = options;
  }
  return chosen.size();
}

} // namespace fsdp
