// One forward and backward of a group, as its state calls it.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "group/flat_views.h"
#include "group/param_group.h"
#include "process_group/observer.h"
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

void FSDPParamGroup::reduce_all() {
  {
    const Range waiting("post_backward_rs_wait", label_);
    comm->finish_reductions(comm->max_input_buffers - 1);
  }
  const Range range("post_backward_reduce", label_);
  std::vector<at::ScalarType> dtypes; // each is reduced by itself
  for (const auto& param : params_) {
    const bool reduced = param->unsharded_grad().defined() ||
                         (reduce_scatter_unused_params && param->tensor().requires_grad());
    const auto dtype = wire_dtype(*param);
    if (reduced && std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) {
      dtypes.push_back(dtype);
    }
  }
  const CollectiveLabel collective(name_);
  for (const auto dtype : dtypes) {
    reduce(dtype);
  }
}

at::ScalarType FSDPParamGroup::wire_dtype(const FSDPParam& param) const {
  const auto dtype = param.unsharded().scalar_type();
  return at::isFloatingType(dtype) ? reduce_dtype.value_or(dtype) : dtype; // complex: its own
}

void FSDPParamGroup::reduce(at::ScalarType dtype) {
  at::NoGradGuard no_grad;
  Reduction reduction;
  std::vector<ReduceInput> inputs;
  for (const auto& param : params_) {
    if (wire_dtype(*param) != dtype) {
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
  if (alone()) {
    for (size_t i = 0; i < reduction.params.size(); ++i) {
      auto grad = inputs[i].grad.to(dtype);
      if (const double factor = gradient_divide_factor.value_or(1); factor != 1) {
        grad = grad.div(factor);
      }
      reduction.params[i]->add_sharded_grad(grad.to(reduction.params[i]->sharded().options()));
    }
    return;
  }
  // Where some were accumulated in the reduce dtype and others were not.
  const bool mixed = std::any_of(inputs.begin(), inputs.end(), [&](const auto& input) {
    return input.grad.scalar_type() != inputs.front().grad.scalar_type();
  });
  for (auto& input : inputs) {
    input.grad = mixed ? input.grad.to(dtype) : input.grad;
  }
  reduction.request = {
      .group = reduce_group_,
      .reduce_dtype = dtype,
      .factors = divide_factors(
          {.reduce_dtype = dtype,
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
    const auto flat = to_shards(finish_reduce(reduction.reducing, reduction.request), reduction);
    int64_t offset = 0;
    for (auto* param : reduction.params) {
      const auto& geometry = param->geometry();
      const auto grad = raw_part(flat, offset, geometry.shard_sizes);
      param->add_sharded_grad(
          grad.scalar_type() == param->dtype() ? grad : grad.to(param->dtype()));
      offset += geometry.padded_numel;
    }
  }
  // The input's memory goes back to compute.
  wait_for_stream(compute, reduction.request.stream);
}

/// Reduced gradients in the shards' dtype, where they have one, and memory.
at::Tensor FSDPParamGroup::to_shards(const at::Tensor& flat, const Reduction& reduction) {
  at::NoGradGuard no_grad;
  const auto dtype = reduction.params.front()->dtype();
  const auto& params = reduction.params;
  const bool one_dtype = std::all_of(
      params.begin(), params.end(), [&](const auto* param) { return param->dtype() == dtype; });
  const auto cast = one_dtype ? flat.to(dtype) : flat;
  if (cast.device() == shard_.device()) {
    return cast;
  }
  const bool pinned = offload_->pin_memory;
  auto on_host = at::empty(cast.sizes(), cast.options().device(at::kCPU).pinned_memory(pinned));
  // Somebody reads it at once, or it may arrive by the end of backward.
  const bool used_now = std::any_of(params.begin(), params.end(), [&](const auto* param) {
    return param->tensor().grad().defined() || param->dtype() != cast.scalar_type() ||
           torch::autograd::impl::post_acc_grad_hooks(param->tensor());
  });
  on_host.copy_(cast, /*non_blocking=*/pinned && !used_now);
  grads_on_host_ = StreamEvent::of(optional_current_stream(cast.device()));
  return on_host;
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
    pending_->wait(optional_current_stream(device())); // its buffer is being written
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
