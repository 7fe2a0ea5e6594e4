// One forward and backward of a group, as its state calls it.
#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "group/param_group.h"
#include "runtime/range.h"

namespace fsdp::detail {

void FSDPParamGroup::pre_forward(bool entering) {
  const Range range("pre_forward", label_);
  training_state = TrainingState::Forward;
  if (entering) {
    was_unsharded_ = shown_ == Face::Unsharded;
  }
  unshard();
  wait_for_unshard();
}

void FSDPParamGroup::post_forward() {
  const Range range("post_forward", label_);
  if (at::GradMode::is_enabled() || post_forward_ranks_ == group_.size()) {
    reshard();
    return;
  }
  // No backward will come to reshard what is kept, and it must not be taken for
  // what an optimizer has made of it.
  if (post_forward_ranks_ > 0) {
    record_event(EventLog::Kind::Reshard, name_, training_state);
  }
  if (post_forward_ranks_ > 0 || !was_unsharded_) {
    to_sharded();
  }
}

bool FSDPParamGroup::pre_backward() {
  if (training_state == TrainingState::PreBackward) {
    return false; // another output of the same forward
  }
  const Range range("pre_backward", label_);
  training_state = TrainingState::PreBackward;
  unshard();
  wait_for_unshard();
  return true;
}

void FSDPParamGroup::prefetch(TrainingState state) {
  const Range range(
      state == TrainingState::Forward ? "forward_prefetch for " : "backward_prefetch for ", name_);
  const auto own = std::exchange(training_state, state);
  const bool was_pending = pending_.has_value();
  try {
    unshard();
    prefetched_ |= !was_pending && pending_ && state == TrainingState::Forward;
  } catch (...) {
    training_state = own;
    throw;
  }
  training_state = own;
}

bool FSDPParamGroup::has_unsharded_grads() const {
  return std::any_of(params_.begin(), params_.end(), [](const auto& param) {
    return param->unsharded_grad().defined();
  });
}

void FSDPParamGroup::post_backward() {
  const Range range("post_backward", label_);
  training_state = TrainingState::PostBackward;
  if (!reduce_grads) {
    const Range accumulating("post_backward_accumulate", label_);
    for (const auto& param : params_) {
      param->accumulate_in(wire_dtype(*param)); // what more microbatches bring is added in it
    }
  }
  if (reshard_after_backward) {
    const Range resharding("post_backward_reshard", label_);
    reshard();
  } else {
    show(Face::Sharded);
  }
  if (reduce_grads) {
    reduce_all();
  }
  record_event(EventLog::Kind::PostBackward, name_, training_state);
}

void FSDPParamGroup::end_backward(bool is_last) {
  wait_for_host_copies();
  training_state = TrainingState::Idle;
  show(Face::Sharded);
  // Between microbatches memory may be kept. After the last, an optimizer may
  // step, which version counters do not always tell.
  maybe_outdated_ = is_unsharded() && is_last && reduce_grads;
  if (is_last) {
    drop_pending();
  }
}

void FSDPParamGroup::discard_pending() {
  if (pending_) {
    const auto current = optional_current_stream(device());
    pending_->wait(current);                      // its buffer is being written
    comm->gather_after(StreamEvent::of(current)); // and goes back to the copy-in stream
    forget_pending();
  }
}

void FSDPParamGroup::forget_pending() {
  pending_.reset();
  prefetched_ = false;
  payloads_.clear();
}

void FSDPParamGroup::drop_pending() {
  if (pending_) {
    discard_pending();
    to_sharded();
  }
}

void FSDPParamGroup::wait_for_host_copies() {
  std::exchange(copied_in_, {}).synchronize();
  std::exchange(grads_on_host_, {}).synchronize();
}

void FSDPParamGroup::drop_unused_prefetch() {
  if (prefetched_) {
    drop_pending();
  }
}

void FSDPParamGroup::reset() {
  training_state = TrainingState::Idle;
  forget_pending(); // not waited for: the peers may be gone
  reduce_scatters_.clear();
  all_reduces_.clear();
  to_sharded();
}

void FSDPParamGroup::drop_grads() {
  for (const auto& param : params_) {
    param->take_unsharded_grad();
    param->partial_grad = at::Tensor();
  }
}

void FSDPParamGroup::set_on_late_grad(const std::function<void()>& on_late_grad) {
  for (const auto& param : params_) {
    param->set_on_grad([this, on_late_grad] {
      if (training_state == TrainingState::Idle) { // no hook has announced a backward
        on_late_grad();
      }
    });
  }
}

} // namespace fsdp::detail
