// One forward and backward of a group, as its state calls it.
#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "group/flat_views.h"
#include "group/param_group.h"
#include "process_group/observer.h"

namespace fsdp::detail {

void FSDPParamGroup::pre_forward(bool entering) {
  training_state = TrainingState::Forward;
  if (entering) {
    was_unsharded_ = shown_ == Face::Unsharded;
  }
  unshard();
  wait_for_unshard();
}

void FSDPParamGroup::post_forward() {
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
  training_state = TrainingState::PreBackward;
  unshard();
  wait_for_unshard();
  return true;
}

void FSDPParamGroup::prefetch(TrainingState state) {
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
  training_state = TrainingState::PostBackward;
  if (reshard_after_backward) {
    reshard();
  } else {
    show(Face::Sharded);
  }
  if (reduce_grads) {
    comm->finish_reductions(comm->max_input_buffers - 1);
    std::vector<at::ScalarType> dtypes; // each is reduced by itself
    for (const auto& param : params_) {
      const bool reduced = param->unsharded_grad().defined() ||
                           (reduce_scatter_unused_params && param->tensor().requires_grad());
      if (reduced && std::find(dtypes.begin(), dtypes.end(), param->dtype()) == dtypes.end()) {
        dtypes.push_back(param->dtype());
      }
    }
    const CollectiveLabel label(name_);
    for (const auto dtype : dtypes) {
      reduce(dtype);
    }
  }
  record_event(EventLog::Kind::PostBackward, name_, training_state);
}

void FSDPParamGroup::reduce(at::ScalarType dtype) {
  at::NoGradGuard no_grad;
  Reduction reduction;
  std::vector<ReduceInput> inputs;
  for (const auto& param : params_) {
    if (param->dtype() != dtype) {
      continue;
    }
    auto grad = param->take_unsharded_grad();
    if (!grad.defined() && reduce_scatter_unused_params && param->tensor().requires_grad()) {
      grad = at::zeros(param->geometry().sizes, param->unsharded().options());
    }
    if (grad.defined()) {
      reduction.params.push_back(param.get());
      inputs.push_back({std::move(grad), param->geometry().dim});
    }
  }
  const auto dtype_on_wire = reduce_dtype.value_or(inputs.front().grad.scalar_type());
  if (alone()) {
    for (size_t i = 0; i < reduction.params.size(); ++i) {
      const auto& grad = inputs[i].grad;
      const double factor = gradient_divide_factor.value_or(1);
      reduction.params[i]->add_sharded_grad(factor == 1 ? grad : grad.div(factor));
    }
    return;
  }
  reduction.request = {
      .group = reduce_group_,
      .reduce_dtype = dtype_on_wire,
      .result_dtype = dtype,
      .factors = divide_factors(
          {.reduce_dtype = dtype_on_wire,
           .shard_size = group_.size(),
           .factor = gradient_divide_factor,
           .force_sum = force_sum_reduction}),
      .stream = comm->reduce_scatter_stream()};
  reduction.reducing = start_reduce(*reduce_scatter_, inputs, reduction.request);
  reductions_.push_back(std::move(reduction));
  comm->add_reduction(weak_from_this());
}

void FSDPParamGroup::finish_reduction() {
  if (reductions_.empty()) {
    return; // reset in between
  }
  auto reduction = std::move(reductions_.front());
  reductions_.pop_front();
  const auto compute = optional_current_stream(device());
  {
    const c10::OptionalStreamGuard on(reduction.request.stream);
    const auto flat = finish_reduce(reduction.reducing, reduction.request);
    int64_t offset = 0;
    for (auto* param : reduction.params) {
      const auto& geometry = param->geometry();
      param->add_sharded_grad(raw_part(flat, offset, geometry.shard_sizes));
      offset += geometry.padded_numel;
    }
  }
  // The input's memory goes back to compute.
  wait_for_stream(compute, reduction.request.stream);
}

void FSDPParamGroup::end_backward(bool is_last) {
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
    pending_->wait(optional_current_stream(device())); // its buffer is being written
    pending_.reset();
    prefetched_ = false;
    payloads_.clear();
  }
}

void FSDPParamGroup::drop_pending() {
  if (pending_) {
    discard_pending();
    to_sharded();
  }
}

void FSDPParamGroup::drop_unused_prefetch() {
  if (prefetched_) {
    drop_pending();
  }
}

void FSDPParamGroup::reset() {
  training_state = TrainingState::Idle;
  pending_.reset(); // not waited for: the peers may be gone
  prefetched_ = false;
  payloads_.clear();
  reductions_.clear();
  to_sharded();
}

void FSDPParamGroup::drop_grads() {
  for (const auto& param : params_) {
    param->take_unsharded_grad();
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
