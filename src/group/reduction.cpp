// How a group's gradients become shards of their average over all ranks.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "group/flat_views.h"
#include "group/param_group.h"
#include "process_group/observer.h"
#include "runtime/range.h"

namespace fsdp::detail {

namespace {

/// Calls `visit(param, part)` for the parts of a flat reduced shard.
template <class Visit>
void for_each_part(
    const at::Tensor& flat, const std::vector<FSDPParam*>& params, const Visit& visit) {
  int64_t offset = 0;
  for (auto* param : params) {
    visit(*param, raw_part(flat, offset, param->geometry().shard_sizes));
    offset += param->geometry().padded_numel;
  }
}

/// The dtype that the shards of all have.
std::optional<at::ScalarType> common_dtype(const std::vector<FSDPParam*>& params) {
  const auto dtype = params.front()->dtype();
  const bool common = std::all_of(
      params.begin(), params.end(), [&](const auto* param) { return param->dtype() == dtype; });
  return common ? std::optional(dtype) : std::nullopt;
}

/// Whether somebody reads their gradients, of that dtype, as soon as they are there:
/// adds them, casts them, or has a hook.
bool are_read_at_once(const std::vector<FSDPParam*>& params, at::ScalarType dtype) {
  return std::any_of(params.begin(), params.end(), [&](const auto* param) {
    return param->tensor().grad().defined() || param->dtype() != dtype ||
           torch::autograd::impl::post_acc_grad_hooks(param->tensor());
  });
}

} // namespace

// Note [Two reductions]
//
// Gradients are reduce-scattered over the ranks that have the other shards.
// With replicas (HSDP) the result is then all-reduced over these, in place, on
// a stream of its own; without shards (replicate) only that is done.
//
//   post-backward of group n      start its reduce-scatter
//   post-backward of group n - 1  finish n's, start its all-reduce
//   post-backward of group n - 3  finish n's all-reduce: at most two are alive
//   end of backward               finish the rest
//
// Offloaded gradients leave the device behind their reduce-scatter, on its stream,
// without anybody waiting for them: then only its input waits for the next group.
//
// A backward with `all_reduce_grads` off keeps the reduce-scattered gradients
// as partial sums, to which the next reduce-scatter adds.

void FSDPParamGroup::reduce_all() {
  {
    const Range waiting("post_backward_rs_wait", label_);
    comm->finish_reduce_scatters(comm->max_input_buffers - 1);
  }
  const Range range("post_backward_reduce", label_);
  std::vector<at::ScalarType> dtypes; // each is reduced by itself
  for (const auto& param : params_) {
    const auto dtype = wire_dtype(*param);
    if (is_reduced(*param) && std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) {
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

bool FSDPParamGroup::is_reduced(const FSDPParam& param) const {
  return param.unsharded_grad().defined() ||
         (reduce_scatter_unused_params && param.tensor().requires_grad()) ||
         (all_reduce_grads && param.partial_grad.defined());
}

void FSDPParamGroup::reduce(at::ScalarType dtype) {
  at::NoGradGuard no_grad;
  Reduction reduction;
  std::vector<ReduceInput> inputs;
  for (const auto& param : params_) {
    if (wire_dtype(*param) != dtype || !is_reduced(*param)) {
      continue;
    }
    auto grad = param->take_unsharded_grad();
    if (!grad.defined()) {
      grad = at::zeros(param->geometry().sizes, param->unsharded().options());
    }
    reduction.params.push_back(param.get());
    inputs.push_back({std::move(grad), param->geometry().dim});
  }
  if (alone() && !replicate_group_ && !all_reduce_hook_) {
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
  reduction.all_reduce = all_reduce_grads;
  reduction.request = {
      .group = reduce_group_,
      .reduce_dtype = dtype,
      .factors = divide_factors(
          {.reduce_dtype = dtype,
           .shard_size = group_.size(),
           .replicate_size = replicate_group_ ? replicate_group_->size() : 1,
           .factor = gradient_divide_factor,
           .force_sum = force_sum_reduction}),
      .stream = comm->reduce_scatter_stream()};
  reduction.reducing = start_reduce(*reduce_scatter_, inputs, reduction.request);
  if (finishes_on_stream(reduction)) {
    const c10::OptionalStreamGuard on(reduction.request.stream);
    std::exchange(reduction.reducing.work, {}).wait(); // it may hold on to the output
    finish_grads(reduction);
    reduction.grads_are_enqueued = true;
  }
  reduce_scatters_.push_back(std::move(reduction));
  comm->add_reduce_scatter(weak_from_this());
}

void FSDPParamGroup::finish_reduce_scatter() {
  if (reduce_scatters_.empty()) {
    return; // reset in between
  }
  auto reduction = std::move(reduce_scatters_.front());
  reduce_scatters_.pop_front();
  const auto compute = optional_current_stream(device());
  const auto scatter = reduction.request.stream;
  if (!reduction.grads_are_enqueued) {
    const c10::OptionalStreamGuard on(scatter);
    std::exchange(reduction.reducing.work, {}).wait();
    add_partial_grads(reduction);
    if (replicate_group_ && !reduction.all_reduce) {
      keep_partial_grads(reduction);
    } else if (!replicate_group_) {
      call_all_reduce_hook(reduction.reducing.output, scatter);
      finish_grads(reduction);
    }
  }
  // The input's memory goes back to compute.
  wait_for_stream(compute, scatter);
  reduction.reducing.input = at::Tensor();
  if (replicate_group_ && reduction.all_reduce) {
    start_all_reduce(std::move(reduction));
  }
}

void FSDPParamGroup::start_all_reduce(Reduction reduction) {
  comm->finish_all_reduces(1);
  const auto& stream = comm->all_reduce_stream();
  wait_for_stream(stream, reduction.request.stream);
  const c10::OptionalStreamGuard on(stream);
  const CollectiveLabel collective(name_);
  reduction.reducing.work = replicate_group_->all_reduce_async(
      reduction.reducing.output, reduction.request.factors.all_reduce_op);
  all_reduces_.push_back(std::move(reduction));
  comm->add_all_reduce(weak_from_this());
}

void FSDPParamGroup::finish_all_reduce() {
  if (all_reduces_.empty()) {
    return; // reset in between
  }
  auto reduction = std::move(all_reduces_.front());
  all_reduces_.pop_front();
  const auto compute = optional_current_stream(device());
  const auto& stream = comm->all_reduce_stream();
  {
    const c10::OptionalStreamGuard on(stream);
    std::exchange(reduction.reducing.work, {}).wait();
    call_all_reduce_hook(reduction.reducing.output, stream);
    finish_grads(reduction);
  }
  // What was allocated on the other stream, and on compute, is free now.
  wait_for_stream(reduction.request.stream, stream);
  wait_for_stream(compute, stream);
}

void FSDPParamGroup::add_partial_grads(const Reduction& reduction) {
  const auto& params = reduction.params;
  if (std::none_of(params.begin(), params.end(), [](const auto* param) {
        return param->partial_grad.defined();
      })) {
    return; // as in most steps: no views of them are made
  }
  at::NoGradGuard no_grad;
  for_each_part(
      reduction.reducing.output, reduction.params, [](FSDPParam& param, const at::Tensor& part) {
        if (param.partial_grad.defined()) {
          part.add_(std::exchange(param.partial_grad, at::Tensor()));
        }
      });
}

void FSDPParamGroup::keep_partial_grads(const Reduction& reduction) {
  for_each_part(reduction.reducing.output, reduction.params, [](FSDPParam& param, at::Tensor part) {
    param.partial_grad = std::move(part);
  });
}

void FSDPParamGroup::call_all_reduce_hook(at::Tensor& flat, const OptionalStream& current) {
  if (!all_reduce_hook_) {
    return;
  }
  const auto stream = all_reduce_hook_stream_ ? all_reduce_hook_stream_ : current;
  const auto numel = flat.numel();
  const auto dtype = flat.scalar_type();
  wait_for_stream(stream, current);
  {
    at::NoGradGuard no_grad;
    const c10::OptionalStreamGuard on(stream);
    all_reduce_hook_(flat);
  }
  check_flat(flat, numel, dtype, c10::str("the all-reduce hook of '", name_, "'"));
  wait_for_stream(current, stream);
}

void FSDPParamGroup::finish_grads(Reduction& reduction) {
  const auto flat = to_shards(finish_reduce(reduction.reducing, reduction.request), reduction);
  for_each_part(flat, reduction.params, [](FSDPParam& param, const at::Tensor& part) {
    param.add_sharded_grad(part.scalar_type() == param.dtype() ? part : part.to(param.dtype()));
  });
}

/// Whether all that is left to do is a copy to the host that the host does not wait
/// for. Then the reduced gradients need not stay on the device until they are finished.
bool FSDPParamGroup::finishes_on_stream(const Reduction& reduction) const {
  const auto dtype = common_dtype(reduction.params);
  return offload_ && offload_->pin_memory && has_streams(device()) && !replicate_group_ &&
         !all_reduce_hook_ && dtype && !are_read_at_once(reduction.params, *dtype);
}

/// Reduced gradients in the shards' dtype, where they have one, and memory.
at::Tensor FSDPParamGroup::to_shards(const at::Tensor& flat, const Reduction& reduction) {
  at::NoGradGuard no_grad;
  const auto dtype = common_dtype(reduction.params);
  const auto cast = dtype ? flat.to(*dtype) : flat;
  if (cast.device() == shard_.device()) {
    return cast;
  }
  const bool pinned = offload_->pin_memory;
  auto on_host = at::empty(cast.sizes(), cast.options().device(at::kCPU).pinned_memory(pinned));
  // Else it may arrive by the end of backward.
  const bool used_now = are_read_at_once(reduction.params, cast.scalar_type());
  on_host.copy_(cast, /*non_blocking=*/pinned && !used_now);
  grads_on_host_ = StreamEvent::of(optional_current_stream(cast.device()));
  return on_host;
}

} // namespace fsdp::detail
