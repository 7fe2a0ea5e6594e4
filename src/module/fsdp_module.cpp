#include <fsdp/fully_shard.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/text.h"
#include "module/module_tree.h"

namespace fsdp {

using detail::FSDPState;

namespace {

std::shared_ptr<FSDPState> locked(const std::weak_ptr<FSDPState>& state) {
  auto alive = state.lock();
  TORCH_CHECK(alive, "[FSDPModule] the module of this handle is gone");
  return alive;
}

detail::FSDPParamGroup* only_group(const FSDPState& state, const char* setter) {
  TORCH_CHECK_VALUE(
      state.groups().size() <= 1, "[FSDPModule] ", setter,
      " is not supported with multiple param groups: '", state.name(), "' has ",
      state.groups().size());
  return state.groups().empty() ? nullptr : state.groups().front().get();
}

} // namespace

bool is_fsdp_module(ModuleRef module) {
  return detail::state_of(*module) != nullptr;
}

UnshardHandle::UnshardHandle(std::weak_ptr<FSDPState> state) : state_(std::move(state)) {}

void UnshardHandle::wait() {
  if (!std::exchange(waited_, true)) {
    locked(state_)->wait_for_unshard();
  }
}

FSDPModule FSDPModule::of(ModuleRef module) {
  auto state = detail::state_of(*module);
  TORCH_CHECK_VALUE(
      state, "[FSDPModule] Expects FSDPModule, but this ", detail::type_name(*module),
      " is not sharded; call fully_shard on it first");
  return FSDPModule(state);
}

FSDPModule::FSDPModule(std::weak_ptr<FSDPState> state) : state_(std::move(state)) {}

std::shared_ptr<FSDPState> FSDPModule::state() const {
  return locked(state_);
}

std::vector<std::shared_ptr<FSDPState>> FSDPModule::states(bool recurse) const {
  const auto own = state();
  return recurse ? own->states_below() : std::vector{own};
}

template <class F>
void FSDPModule::for_each_group(bool recurse, F&& set) const {
  for (const auto& state : states(recurse)) {
    for (const auto& group : state->groups()) {
      set(*group);
    }
  }
}

// ------------------------------------------------------------ Parameters

std::optional<UnshardHandle> FSDPModule::unshard(bool async_op) {
  state()->unshard();
  if (async_op) {
    return UnshardHandle(state_);
  }
  state()->wait_for_unshard();
  return std::nullopt;
}

void FSDPModule::reshard() {
  state()->reshard();
}

bool FSDPModule::is_unsharded() const {
  const auto own = state();
  return std::all_of(own->groups().begin(), own->groups().end(), [](const auto& group) {
    return group->is_unsharded();
  });
}

void FSDPModule::reset_iter_state() {
  state()->reset();
}

// ------------------------------------------------------------ Iteration

void FSDPModule::set_is_last_backward(bool is_last_backward) {
  state()->set_is_last_backward(is_last_backward);
}

void FSDPModule::set_requires_gradient_sync(bool requires_gradient_sync, bool recurse) {
  for_each_group(recurse, [&](auto& group) {
    group.reduce_grads = requires_gradient_sync;
    group.reducer().all_reduce_grads = requires_gradient_sync;
  });
}

void FSDPModule::set_requires_all_reduce(bool requires_all_reduce, bool recurse) {
  for_each_group(
      recurse, [&](auto& group) { group.reducer().all_reduce_grads = requires_all_reduce; });
}

void FSDPModule::set_reshard_after_forward(bool reshard_after_forward, bool recurse) {
  for (const auto& state : states(recurse)) {
    state->auto_reshard_after_forward = false;
    for (const auto& group : state->groups()) {
      group->set_ranks_after_forward(reshard_after_forward ? group->size() : 0);
    }
  }
}

void FSDPModule::set_reshard_after_backward(bool reshard_after_backward, bool recurse) {
  for_each_group(
      recurse, [&](auto& group) { group.reshard_after_backward = reshard_after_backward; });
}

void FSDPModule::set_unshard_in_backward(bool unshard_in_backward) {
  for_each_group(false, [&](auto& group) { group.unshard_in_backward = unshard_in_backward; });
}

std::vector<std::weak_ptr<FSDPState>> FSDPModule::states_of(
    const std::vector<FSDPModule>& modules) {
  std::vector<std::weak_ptr<FSDPState>> states;
  for (const auto& module : modules) {
    states.push_back(module.state());
  }
  return states;
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules) {
  state()->forward_prefetch = states_of(modules);
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules) {
  state()->backward_prefetch = states_of(modules);
}

void FSDPModule::set_post_optim_event(c10::Event event) {
  state()->set_post_optim_event(detail::StreamEvent(std::move(event)));
}

// ------------------------------------------------------------ Reduction

void FSDPModule::set_gradient_divide_factor(double factor) {
  TORCH_CHECK_VALUE(
      factor > 0 && std::isfinite(factor), "[FSDPModule] set_gradient_divide_factor: ", factor,
      " is not positive and finite");
  for_each_group(false, [&](auto& group) { group.reducer().gradient_divide_factor = factor; });
}

void FSDPModule::set_force_sum_reduction_for_comms(bool force_sum) {
  for_each_group(false, [&](auto& group) { group.reducer().force_sum = force_sum; });
}

void FSDPModule::set_reduce_scatter_unused_params(bool enable, bool recurse) {
  for_each_group(recurse, [&](auto& group) { group.reducer().reduce_unused_params = enable; });
}

void FSDPModule::set_reduce_scatter_max_input_buffers(int max_input_buffers, bool recurse) {
  TORCH_CHECK_VALUE(
      max_input_buffers >= 1, "[FSDPModule] max_input_buffers must be a positive int, not ",
      max_input_buffers);
  for_each_group(recurse, [&](auto& group) {
    group.max_input_buffers = static_cast<size_t>(max_input_buffers);
  });
}

void FSDPModule::set_separate_reduce_scatter_group(bool enable, bool recurse) {
  for_each_group(recurse, [&](auto& group) { group.reducer().set_separate_group(enable); });
}

// ------------------------------------------------------------ Communication

void FSDPModule::set_custom_all_gather(std::shared_ptr<AllGather> comm) {
  TORCH_CHECK_VALUE(comm, "[FSDPModule] set_custom_all_gather: a null pointer");
  if (auto* group = only_group(*state(), "set_custom_all_gather")) {
    group->set_custom(std::move(comm));
  }
}

void FSDPModule::set_custom_reduce_scatter(std::shared_ptr<ReduceScatter> comm) {
  TORCH_CHECK_VALUE(comm, "[FSDPModule] set_custom_reduce_scatter: a null pointer");
  if (auto* group = only_group(*state(), "set_custom_reduce_scatter")) {
    group->reducer().set_custom(std::move(comm));
  }
}

void FSDPModule::set_all_reduce_hook(
    const std::function<void(at::Tensor&)>& hook, std::optional<c10::Stream> stream) {
  for (const auto& group : state()->groups()) {
    group->reducer().set_all_reduce_hook(hook, stream);
  }
}

void FSDPModule::set_reduced_grads_hook(const ReducedGradsHook& hook, bool recurse) {
  for_each_group(recurse, [&](auto& group) { // all checks come before the first change
    TORCH_CHECK_VALUE(
        !hook || !group.reducer().has_reduced_grads_hook(), "[FSDPModule] the gradients of ",
        detail::module_text(group.name()),
        " have a hook already, perhaps that of another StepInBackward; end that one first");
  });
  for_each_group(recurse, [&](auto& group) { group.reducer().set_reduced_grads_hook(hook); });
}

void FSDPModule::set_allocate_memory_from_process_group_for_comm(bool enable) {
  for_each_group(false, [&](auto& group) { group.allocate_from_process_group(enable); });
}

void FSDPModule::set_symm_mem_for_comm(const std::string& backend) {
  (void)state(); // throws if the module is gone
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "[fully_shard] there are no buffers in symmetric memory (", backend,
      ") yet; set_allocate_memory_from_process_group_for_comm takes memory that NCCL has "
      "registered");
}

void share_comm_ctx(const std::vector<FSDPModule>& modules) {
  for (const auto& module : modules) {
    module.state()->share_comm(*modules.front().state());
  }
}

} // namespace fsdp
