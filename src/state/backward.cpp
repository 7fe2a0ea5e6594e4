// The functions that autograd calls before and after the backward of a module, and at its end.
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "process_group/agreement.h"
#include "runtime/range.h"
#include "state/autograd_hooks.h"
#include "state/fsdp_state.h"

namespace fsdp::detail {

uint64_t FSDPState::shard_version() const {
  uint64_t sum = 0;
  for (const auto& group : groups_) {
    sum += group->shard_version();
  }
  return sum;
}

FSDPState::BackwardHook FSDPState::backward_hook(bool partial) {
  if (!at::GradMode::is_enabled()) {
    return [] {};
  }
  auto record = std::make_shared<ForwardRecord>();
  if (!partial && !groups_.empty() && !inside_backward()) {
    record->groups.assign(groups_.begin(), groups_.end());
    comm_->record_forward(record);
  }
  return [weak = weak_from_this(), name = name_, record, version = shard_version(), partial] {
    const auto self = weak.lock();
    TORCH_CHECK(
        self, "[fully_shard] backward reached an output of '", name,
        "' after the module was gone; keep the module until backward has ended");
    self->pre_backward(*record, version, partial);
  };
}

void FSDPState::pre_backward(ForwardRecord& record, uint64_t version, bool partial) {
  check_updated();
  const bool replaced = std::any_of(
      groups_.begin(), groups_.end(), [](const auto& group) { return group->take_replacements(); });
  TORCH_CHECK(
      version == shard_version() && !replaced, "[fully_shard] parameters of ", module_text(name_),
      " were modified (an optimizer step, for example) between its forward and its backward, "
      "which would compute gradients of something else; run forward again after the step");
  TORCH_CHECK(
      training_state_ != TrainingState::Forward, "[fully_shard] backward reached an output of ",
      module_text(name_),
      " while another forward of it runs; run that backward before or after it");
  record.is_over = !keeps_graph();
  context_->creates_graph |= at::GradMode::is_enabled();
  if (partial) {
    queue_partial_callback();
  } else {
    queue_final_callback();
  }
  if (training_state_ == TrainingState::PreBackward) {
    return; // another output of the same forward
  }
  enter(TrainingState::PreBackward);
  for (const auto& group : groups_) {
    group->pre_backward();
  }
  if (!groups_.empty()) {
    prefetch_for_backward(record);
  }
}

/// Prefetches the modules that the user named, or else the one whose forward came before: backward
/// most likely goes in reverse order.
void FSDPState::prefetch_for_backward(const ForwardRecord& record) {
  std::vector<std::shared_ptr<FSDPParamGroup>> next;
  for (const auto& weak : backward_prefetch) {
    if (const auto state = weak.lock()) {
      next.insert(next.end(), state->groups_.rbegin(), state->groups_.rend());
    }
  }
  if (backward_prefetch.empty()) {
    if (const auto before = comm_->forward_before(record)) {
      for (auto weak = before->groups.rbegin(); weak != before->groups.rend(); ++weak) {
        next.push_back(weak->lock());
      }
    }
  }
  for (const auto& group : next) {
    if (group) {
      group->prefetch(UnshardFor::BackwardPrefetch);
    }
  }
}

void FSDPState::post_backward() {
  grad_arrived(); // no hook announces the backward of an intermediate result
  if (training_state_ != TrainingState::Forward) { // else a backward inside of the forward
    enter(TrainingState::PostBackward);
  }
  for (auto group = groups_.rbegin(); group != groups_.rend(); ++group) {
    (*group)->post_backward(context_->backward_kind());
  }
}

/// A gradient that no hook has announced belongs to a loss of the parameters alone, for example.
void FSDPState::grad_arrived() {
  if (training_state_ == TrainingState::Idle) {
    queue_final_callback();
  }
}

void FSDPState::queue_final_callback() {
  if (context_->final_callback_queued) {
    return;
  }
  context_->final_callback_queued = true;
  at_end_of_backward(
      [context = context_, comm = comm_] { finish_backward(*context, *comm); },
      [context = context_, comm = comm_] { reset_all(*context, *comm, /*drop_grads=*/true); });
}

/// The backward of one of several modules that was called by itself ends for this state alone. The
/// backward of the other states is still to come.
void FSDPState::queue_partial_callback() {
  if (context_->final_callback_queued || in_backward()) {
    return;
  }
  at_end_of_backward(
      [self = shared_from_this()] { finish_states({self}, *self->context_, *self->comm_); },
      [context = context_, comm = comm_] { reset_all(*context, *comm, /*drop_grads=*/true); });
}

void FSDPState::finish_states(
    const std::vector<std::shared_ptr<FSDPState>>& states,
    StateContext& context,
    CommContext& comm) {
  const auto kind = context.backward_kind();
  context.creates_graph = false;
  for (const auto& state : states) {
    state->yet_to_forward_.clear();
    for (auto it = state->groups_.rbegin(); it != state->groups_.rend(); ++it) {
      // Post-backward has not come if the inputs need no gradient, or if the module was not used.
      // Gradients come after it if a weight is used elsewhere, too.
      auto& group = **it;
      const bool late = group.reduce_grads && group.reducer().has_grads();
      if (state->training_state_ != TrainingState::PostBackward || late) {
        group.post_backward(kind);
      }
    }
    state->enter(TrainingState::Idle);
  }
  comm.reductions.finish_all();
  for (const auto& state : states) {
    for (const auto& group : state->groups_) {
      group->end_backward(kind);
    }
  }
  comm.release_retired();
}

void FSDPState::compare_calls_of(const StateContext& context, const CommContext& comm) {
  if (can_compare_calls(context.device)) {
    // Compute goes on beside it, because the reductions have ended.
    const c10::OptionalStreamGuard on(comm.reductions.reduce_scatter_stream());
    compare_calls(context.process_groups, context.device);
  }
}

void FSDPState::finish_backward() {
  finish_backward(*context_, *comm_);
}

void FSDPState::finish_backward(StateContext& context, CommContext& comm) {
  const Range range("root_post_backward_callback");
  std::vector<std::shared_ptr<FSDPState>> states;
  for (const auto& weak : context.states) {
    if (auto state = weak.lock()) {
      states.push_back(std::move(state));
    }
  }
  // A backward inside a forward leaves the modules of that forward alone.
  std::erase_if(states, [](const auto& state) { return !state->running_.empty(); });
  finish_states(states, context, comm);
  if (context.is_last_backward) {
    comm.forget_forwards();
    compare_calls_of(context, comm);
  }
  context.final_callback_queued = false;
}

} // namespace fsdp::detail
