#include "state/fsdp_state.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "state/autograd_hooks.h"

namespace fsdp::detail {

FSDPState::FSDPState(
    std::string name, std::unique_ptr<FSDPParamGroup> group, FindStates find_states)
    : name_(std::move(name)), group_(std::move(group)), find_states_(std::move(find_states)) {}

// ------------------------------------------------------------ Lazy init

// The first module whose forward runs is the root of all that is below it.
void FSDPState::lazy_init() {
  const auto states = find_states_();
  for (const auto& state : states) {
    TORCH_CHECK(
        state.get() == this || !state->context_, "[fully_shard] module '", state->name_,
        "' ran its forward before '", name_,
        "', which contains it, and so became a root of its own; run the outer module first");
  }
  auto context = std::make_shared<StateContext>();
  for (const auto& state : states) {
    context->states.push_back(state);
    state->context_ = context;
  }
  is_root_ = true;
}

// ------------------------------------------------------------ Forward

void FSDPState::pre_forward() {
  if (!context_) {
    lazy_init();
  }
  in_forward_ = true;
  if (training_state_ != TrainingState::PreBackward) { // else: recomputed in backward
    training_state_ = TrainingState::Forward;
  }
  unshard();
}

void FSDPState::replace_inputs(const std::vector<at::Tensor*>& tensors) {
  if (training_state_ == TrainingState::Forward && group_) {
    call_after_gradients(tensors, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) {
        self->post_backward();
      }
    });
  }
}

void FSDPState::post_forward(const std::vector<at::Tensor*>& outputs) {
  in_forward_ = false;
  if (training_state_ == TrainingState::PreBackward) {
    return;
  }
  if (group_) {
    check_outputs(outputs);
    // Without gradients no backward will come to reshard what is kept.
    const bool keeps = !reshard_after_forward.value_or(!is_root_) && at::GradMode::is_enabled();
    if (!inside_backward()) {
      if (!keeps) {
        group_->reshard();
      }
      if (at::GradMode::is_enabled()) {
        post_forward_indices_.push_back(context_->post_forward_order.size());
        context_->post_forward_order.push_back(weak_from_this());
      }
    }
  }
  training_state_ = TrainingState::Idle;
  call_at_each_gradient(outputs, [weak = weak_from_this()] {
    if (const auto self = weak.lock()) {
      self->pre_backward();
    }
  });
}

void FSDPState::forward_failed() {
  in_forward_ = false;
  if (!context_ || training_state_ == TrainingState::PreBackward) {
    return; // the end of backward puts things right
  }
  training_state_ = TrainingState::Idle;
  reshard();
}

// A module that returns its own weight would hand out memory that is about to
// be freed, or a tensor that is about to show the shard.
void FSDPState::check_outputs(const std::vector<at::Tensor*>& outputs) const {
  for (const auto* output : outputs) {
    if (!output->defined() || !output->has_storage()) {
      continue;
    }
    for (const auto& param : group_->params()) {
      TORCH_CHECK(
          !output->is_same(param.tensor()) && !output->is_alias_of(param.unsharded()),
          "[fully_shard] the forward of '", name_, "' returns its parameter '", param.name(),
          "' or a view of it, whose memory is freed afterwards; return a clone()");
    }
  }
}

// ------------------------------------------------------------ Backward

void FSDPState::pre_backward() {
  queue_final_callback();
  if (training_state_ == TrainingState::PreBackward) {
    return; // another output of the same forward
  }
  training_state_ = TrainingState::PreBackward;
  unshard();
  prefetch_before_backward();
}

// In reverse order of the forwards, as backward most likely goes.
void FSDPState::prefetch_before_backward() {
  if (post_forward_indices_.empty()) {
    return;
  }
  const auto index = post_forward_indices_.back();
  post_forward_indices_.pop_back();
  if (index == 0 || index > context_->post_forward_order.size()) {
    return;
  }
  if (const auto previous = context_->post_forward_order[index - 1].lock()) {
    previous->group_->unshard();
  }
}

void FSDPState::post_backward() {
  training_state_ = TrainingState::PostBackward;
  if (!group_) {
    return;
  }
  if (reduce_grads) {
    group_->reduce_grads();
  } else {
    group_->reshard(); // the gradients stay in the group until they are reduced
  }
}

void FSDPState::queue_final_callback() {
  if (context_->final_callback_queued) {
    return;
  }
  context_->final_callback_queued = true;
  at_end_of_backward(
      [context = context_] { finish_backward(*context); },
      [context = context_] { reset_all(*context); });
}

void FSDPState::finish_backward(StateContext& context) {
  for (const auto& weak : context.states) {
    const auto state = weak.lock();
    if (!state) {
      continue;
    }
    // Inputs that need no gradient, modules that were not used, and gradients
    // that came after post-backward (a weight used elsewhere too).
    const bool late = state->group_ && state->group_->has_unsharded_grads();
    if (state->training_state_ != TrainingState::PostBackward || (late && state->reduce_grads)) {
      state->post_backward();
    }
    state->training_state_ = TrainingState::Idle;
    if (context.is_last_backward && state->group_) {
      state->group_->drop_pending();
      state->post_forward_indices_.clear();
    }
  }
  if (context.is_last_backward) {
    context.post_forward_order.clear();
  }
  context.final_callback_queued = false;
}

// ------------------------------------------------------------ Called by the user

void FSDPState::unshard() {
  if (group_) {
    group_->unshard();
    group_->wait_for_unshard();
  }
}

void FSDPState::reshard() {
  if (group_) {
    group_->reshard();
  }
}

void FSDPState::reset() {
  if (context_) {
    reset_all(*context_);
  }
}

void FSDPState::reset_all(StateContext& context) {
  for (const auto& weak : context.states) {
    if (const auto state = weak.lock()) {
      state->training_state_ = TrainingState::Idle;
      state->in_forward_ = false;
      state->post_forward_indices_.clear();
      if (state->group_) {
        state->group_->reset();
      }
    }
  }
  context.post_forward_order.clear();
  context.final_callback_queued = false;
}

void FSDPState::set_is_last_backward(bool last) {
  if (!context_) {
    lazy_init();
  }
  context_->is_last_backward = last;
}

} // namespace fsdp::detail
