#include <fsdp/distributed.h>
#include <fsdp/fully_shard.h>

#include <algorithm>
#include <set>
#include <utility>

#include "group/param_group.h"
#include "state/fsdp_state.h"

namespace fsdp {

namespace {

using detail::FSDPState;

std::shared_ptr<FSDPState> state_of(torch::nn::Module& module) {
  const auto* hookable = dynamic_cast<const Hookable*>(&module);
  return hookable ? hookable->fsdp_state : nullptr;
}

/// `module` and the modules below it, in order, with their names.
void walk(
    torch::nn::Module& module,
    const std::string& name,
    const std::function<void(const std::string&, torch::nn::Module&)>& visit) {
  visit(name, module);
  for (const auto& child : module.named_children()) {
    walk(*child.value(), name.empty() ? child.key() : name + "." + child.key(), visit);
  }
}

std::vector<std::shared_ptr<FSDPState>> states_below(torch::nn::Module& module) {
  std::vector<std::shared_ptr<FSDPState>> states;
  walk(module, "", [&](const std::string&, torch::nn::Module& each) {
    const auto state = state_of(each);
    if (state && std::find(states.begin(), states.end(), state) == states.end()) {
      states.push_back(state);
    }
  });
  return states;
}

/// Parameters that nobody below has taken, each once however often it is used.
std::vector<detail::ParamSpec> unmanaged_params(
    torch::nn::Module& module, const FullyShardOptions& options) {
  std::set<const at::TensorImpl*> taken;
  for (const auto& param : options.ignored_params) {
    taken.insert(param.unsafeGetTensorImpl());
  }
  for (const auto& state : states_below(module)) {
    if (state->group()) {
      for (const auto& param : state->group()->params()) {
        taken.insert(param.tensor().unsafeGetTensorImpl());
      }
    }
  }
  std::vector<detail::ParamSpec> specs;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    if (!item.value().defined() || !taken.insert(item.value().unsafeGetTensorImpl()).second) {
      continue;
    }
    const auto placement = options.shard_placement_fn
                               ? options.shard_placement_fn(item.key(), item.value())
                               : std::nullopt;
    specs.push_back({item.value(), item.key(), placement.value_or(Shard{0}).dim});
  }
  return specs;
}

DeviceMesh mesh_of(const FullyShardOptions& options) {
  const auto mesh = options.mesh ? *options.mesh : init_device_mesh(c10::kCPU, {get_world_size()});
  TORCH_CHECK_VALUE(
      mesh.ndim() == 1, "[fully_shard] the mesh must have one axis, but is ", mesh.str(),
      "; take a slice of it");
  return mesh;
}

} // namespace

FSDPModule fully_shard(ModuleRef module, const FullyShardOptions& options) {
  const auto type = c10::demangle(typeid(*module).name());
  auto* hookable = dynamic_cast<Hookable*>(&*module);
  TORCH_CHECK_VALUE(
      hookable, "[fully_shard] ", type,
      " is not hooked, so its forward cannot be intercepted; declare its holder with FSDP_MODULE "
      "instead of TORCH_MODULE");
  TORCH_CHECK_VALUE(
      !hookable->fsdp_state, "[fully_shard] this ", type, " has been sharded already");
  const auto mesh = mesh_of(options);
  const auto specs = unmanaged_params(*module, options);
  auto group = specs.empty()
                   ? nullptr
                   : std::make_unique<detail::FSDPParamGroup>(specs, mesh.get_group(), type);
  // The state lives in the module, so it refers to it plainly.
  auto state = std::make_shared<FSDPState>(
      type, std::move(group), [raw = &*module] { return states_below(*raw); });
  state->reshard_after_forward = options.reshard_after_forward;
  hookable->fsdp_state = state;
  return FSDPModule(state);
}

bool is_fsdp_module(ModuleRef module) {
  return state_of(*module) != nullptr;
}

FSDPModule FSDPModule::of(ModuleRef module) {
  auto state = state_of(*module);
  TORCH_CHECK_VALUE(
      state, "[FSDPModule] this ", c10::demangle(typeid(*module).name()), " is not sharded");
  return FSDPModule(state);
}

FSDPModule::FSDPModule(std::weak_ptr<FSDPState> state) : state_(std::move(state)) {}

std::shared_ptr<FSDPState> FSDPModule::state() const {
  auto state = state_.lock();
  TORCH_CHECK(state, "[FSDPModule] the module of this handle is gone");
  return state;
}

std::vector<std::shared_ptr<FSDPState>> FSDPModule::states(bool recurse) const {
  const auto own = state();
  return recurse ? own->states_below() : std::vector{own};
}

void FSDPModule::unshard() {
  state()->unshard();
}

void FSDPModule::reshard() {
  state()->reshard();
}

void FSDPModule::reset_iter_state() {
  state()->reset();
}

void FSDPModule::set_requires_gradient_sync(bool requires_gradient_sync, bool recurse) {
  for (const auto& state : states(recurse)) {
    state->reduce_grads = requires_gradient_sync;
  }
}

void FSDPModule::set_reshard_after_forward(bool reshard_after_forward, bool recurse) {
  for (const auto& state : states(recurse)) {
    state->reshard_after_forward = reshard_after_forward;
  }
}

void FSDPModule::set_is_last_backward(bool is_last_backward) {
  state()->set_is_last_backward(is_last_backward);
}

void FSDPModule::set_gradient_divide_factor(double factor) {
  if (auto* group = state()->group()) {
    group->gradient_divide_factor = factor;
  }
}

void FSDPModule::set_force_sum_reduction_for_comms(bool force_sum) {
  if (auto* group = state()->group()) {
    group->force_sum_reduction = force_sum;
  }
}

} // namespace fsdp
