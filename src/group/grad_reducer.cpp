// How a group's gradients become shards of their average over all ranks.
#include "group/grad_reducer.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "base/text.h"
#include "group/flat_views.h"
#include "process_group/observer.h"

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

/// The dtype of all shards. Empty if there are several.
std::optional<at::ScalarType> common_dtype(const std::vector<FSDPParam*>& params) {
  const auto dtype = params.front()->dtype();
  const bool common = std::all_of(
      params.begin(), params.end(), [&](const auto* param) { return param->dtype() == dtype; });
  return common ? std::optional(dtype) : std::nullopt;
}

/// Returns true if reduced gradients of this dtype are read at once: they are added to others,
/// cast, or given to a hook.
bool are_read_at_once(const std::vector<FSDPParam*>& params, at::ScalarType dtype) {
  return std::any_of(params.begin(), params.end(), [&](const auto* param) {
    const auto& held = param->user().tensor();
    return held.grad().defined() || param->dtype() != dtype ||
           torch::autograd::impl::post_acc_grad_hooks(held);
  });
}

/// Adds the partial sums of earlier backwards to the reduce-scattered gradients.
void add_partial_grads(const Reduction& reduction) {
  const auto& params = reduction.params;
  if (std::none_of(params.begin(), params.end(), [](const auto* param) {
        return param->partial_grad.defined();
      })) {
    return; // as in most steps, which make no views then
  }
  at::NoGradGuard no_grad;
  for_each_part(
      reduction.reducing.output, reduction.params, [](FSDPParam& param, const at::Tensor& part) {
        if (param.partial_grad.defined()) {
          part.add_(std::exchange(param.partial_grad, at::Tensor()));
        }
      });
}

void keep_partial_grads(const Reduction& reduction) {
  for_each_part(reduction.reducing.output, reduction.params, [](FSDPParam& param, at::Tensor part) {
    param.partial_grad = std::move(part);
  });
}

} // namespace

GradReducer::GradReducer(
    FlatParams& flat,
    const std::optional<ProcessGroup>& replicas,
    std::optional<at::ScalarType> reduce_dtype)
    : flat_(flat), replicas_(replicas), reduce_dtype_(reduce_dtype), group_(flat.ranks()) {
  for (const auto& param : flat_.params()) {
    param->set_reduce_dtype(reduce_dtype);
  }
}

bool GradReducer::has_grads() const {
  return std::any_of(flat_.params().begin(), flat_.params().end(), [](const auto& param) {
    return param->unsharded_grad().defined();
  });
}

void GradReducer::accumulate() {
  for (const auto& param : flat_.params()) {
    param->accumulate_in(wire_dtype(*param));
  }
}

void GradReducer::drop_grads() {
  for (const auto& param : flat_.params()) {
    param->drop_unsharded_grad();
    param->partial_grad = at::Tensor();
  }
  unreported_.clear();
}

void GradReducer::wait_for_host_copies() {
  std::exchange(grads_on_host_, {}).synchronize();
}

/// The dtype in which the parameter's gradient is reduced. A complex gradient keeps its own.
at::ScalarType GradReducer::wire_dtype(const FSDPParam& param) const {
  const auto dtype = param.unsharded().scalar_type();
  return at::isFloatingType(dtype) ? reduce_dtype_.value_or(dtype) : dtype;
}

void GradReducer::add_to(ShardingPlan::Group& plan) const {
  std::set<at::ScalarType> dtypes; // each is reduced by itself
  for (const auto& param : flat_.params()) {
    if (!param->user().tensor().requires_grad()) {
      continue;
    }
    const auto dtype = wire_dtype(*param);
    const auto bytes =
        param->geometry().gathered_numel() * static_cast<int64_t>(c10::elementSize(dtype));
    dtypes.insert(dtype);
    plan.reduce_scatter_bytes += flat_.alone() ? 0 : bytes;
    plan.all_reduce_bytes += replicas_ ? bytes / flat_.ranks().size() : 0;
  }
  plan.reduce_scatters = flat_.alone() ? 0 : static_cast<int64_t>(dtypes.size());
  plan.all_reduces = replicas_ ? static_cast<int64_t>(dtypes.size()) : 0;
}

bool GradReducer::is_reduced(const FSDPParam& param) const {
  return param.unsharded_grad().defined() ||
         (reduce_unused_params && param.user().tensor().requires_grad()) ||
         (all_reduce_grads && param.partial_grad.defined());
}

// ------------------------------------------------------------ Start

void GradReducer::start(ReductionQueue& queue, SpareMemory& spare, bool is_last) {
  std::vector<at::ScalarType> dtypes; // each is reduced by itself
  for (const auto& param : flat_.params()) {
    const auto dtype = wire_dtype(*param);
    if (is_reduced(*param) && std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) {
      dtypes.push_back(dtype);
    }
  }
  for (const auto dtype : dtypes) {
    start(queue, spare, dtype, is_last);
  }
}

/// Takes the gradients that are reduced in this dtype: fills the parameters of the reduction, and
/// `inputs`. An unused parameter's gradient is zero.
Reduction GradReducer::take_grads(at::ScalarType dtype, std::vector<ReduceInput>& inputs) const {
  Reduction reduction;
  for (const auto& param : flat_.params()) {
    if (wire_dtype(*param) != dtype || !is_reduced(*param)) {
      continue;
    }
    auto grad = param->take_unsharded_grad();
    if (!grad.defined()) {
      grad = at::zeros(param->geometry().sizes, param->unsharded().options());
    }
    reduction.params.push_back(param.get());
    const auto& geometry = param->geometry();
    if (geometry.merged_dims > 1) {
      grad = grad.reshape(flat_.alone() ? geometry.shard_sizes : geometry.divided_sizes);
    }
    inputs.push_back({std::move(grad), geometry.dim});
  }
  return reduction;
}

void GradReducer::start(
    ReductionQueue& queue, SpareMemory& spare, at::ScalarType dtype, bool is_last) {
  at::NoGradGuard no_grad;
  std::vector<ReduceInput> inputs;
  auto reduction = take_grads(dtype, inputs);
  reduction.is_last = is_last;
  if (flat_.alone() && !replicas_ && !all_reduce_hook_) {
    add_grads_alone(reduction, inputs, dtype);
    return;
  }
  // Some gradients were accumulated in the reduce dtype and others were not.
  const bool mixed = std::any_of(inputs.begin(), inputs.end(), [&](const auto& input) {
    return input.grad.scalar_type() != inputs.front().grad.scalar_type();
  });
  for (auto& input : inputs) {
    input.grad = mixed ? input.grad.to(dtype) : input.grad;
  }
  reduction.reducer = weak_from_this();
  reduction.all_reduce = all_reduce_grads;
  reduction.request = {
      .group = group_,
      .reduce_dtype = dtype,
      .factors = divide_factors(
          {.reduce_dtype = dtype,
           .shard_size = flat_.ranks().size(),
           .replicate_size = replicas_ ? replicas_->size() : 1,
           .factor = gradient_divide_factor,
           .force_sum = force_sum}),
      .stream = queue.reduce_scatter_stream()};
  if (!has_streams(flat_.device()) && reduce_scatter_ == default_reduce_scatter()) {
    reduction.request.input_memory = &spare;
  }
  const CollectiveLabel collective(name_, &flat_.purpose(reduction.params));
  reduction.reducing = start_reduce(*reduce_scatter_, inputs, reduction.request);
  if (finishes_on_stream(reduction)) {
    const c10::OptionalStreamGuard on(reduction.request.stream);
    std::exchange(reduction.reducing.work, {}).wait(); // it may hold on to the output
    finish_grads(reduction);
    reduction.grads_are_enqueued = true;
  }
  queue.add(std::move(reduction));
}

/// Adds the gradients of a single rank, divided by the user's factor if there is one.
void GradReducer::add_grads_alone(
    const Reduction& reduction, const std::vector<ReduceInput>& inputs, at::ScalarType dtype) {
  for (size_t i = 0; i < reduction.params.size(); ++i) {
    auto grad = inputs[i].grad.to(dtype);
    if (const double factor = gradient_divide_factor.value_or(1); factor != 1) {
      grad = grad.div(factor);
    }
    reduction.params[i]->add_sharded_grad(grad.to(reduction.params[i]->sharded().options()));
  }
  grads_finished(reduction);
}

// ------------------------------------------------------------ Finish

bool GradReducer::finish_reduce_scatter(Reduction& reduction) {
  const auto compute = optional_current_stream(flat_.device());
  const auto& scatter = reduction.request.stream;
  if (!reduction.grads_are_enqueued) {
    const c10::OptionalStreamGuard on(scatter);
    std::exchange(reduction.reducing.work, {}).wait();
    if (reduction.request.input_memory) {
      reduction.request.input_memory->keep(std::exchange(reduction.reducing.input, at::Tensor()));
    }
    add_partial_grads(reduction);
    if (replicas_ && !reduction.all_reduce) {
      keep_partial_grads(reduction);
    } else if (!replicas_) {
      call_all_reduce_hook(reduction.reducing.output, scatter);
      finish_grads(reduction);
    }
  }
  // Compute may reuse the input's memory after this reduce-scatter.
  wait_for_stream(compute, scatter);
  reduction.reducing.input = at::Tensor();
  return replicas_ && reduction.all_reduce;
}

void GradReducer::start_all_reduce(Reduction& reduction, const OptionalStream& stream) {
  wait_for_stream(stream, reduction.request.stream);
  const c10::OptionalStreamGuard on(stream);
  const CollectiveLabel collective(name_, &flat_.purpose(reduction.params));
  reduction.reducing.work = replicas_->all_reduce_async(
      reduction.reducing.output, reduction.request.factors.all_reduce_op);
}

void GradReducer::finish_all_reduce(Reduction& reduction, const OptionalStream& stream) {
  const auto compute = optional_current_stream(flat_.device());
  {
    const c10::OptionalStreamGuard on(stream);
    std::exchange(reduction.reducing.work, {}).wait();
    call_all_reduce_hook(reduction.reducing.output, stream);
    finish_grads(reduction);
  }
  // Both streams may reuse their memory after this all-reduce.
  wait_for_stream(reduction.request.stream, stream);
  wait_for_stream(compute, stream);
}

void GradReducer::call_all_reduce_hook(at::Tensor& flat, const OptionalStream& current) {
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
  check_flat(flat, numel, dtype, "the all-reduce hook of " + module_text(name_));
  wait_for_stream(current, stream);
}

void GradReducer::finish_grads(Reduction& reduction) {
  const auto flat = to_shards(finish_reduce(reduction.reducing, reduction.request), reduction);
  const auto held = reduction.params.front()->user().begin();
  for_each_part(flat, reduction.params, [](FSDPParam& param, const at::Tensor& part) {
    param.add_sharded_grad(part.scalar_type() == param.dtype() ? part : part.to(param.dtype()));
  });
  grads_finished(reduction);
}

void GradReducer::grads_finished(const Reduction& reduction) {
  if (reduced_grads_hook_) {
    unreported_.insert(unreported_.end(), reduction.params.begin(), reduction.params.end());
    if (reduction.is_last) {
      report_complete();
    }
  }
}

void GradReducer::report_complete() {
  if (unreported_.empty()) {
    return;
  }
  ReducedGrads grads;
  grads.in_use = std::make_shared<int>();
  {
    const auto held = unreported_.front()->user().begin();
    std::set<const FSDPParam*> seen;
    for (auto* param : std::exchange(unreported_, {})) {
      const auto& tensor = param->user().tensor();
      if (tensor.grad().defined() && seen.insert(param).second) { // else somebody has cleared it
        grads.params.push_back(tensor);
        param->update = grads.in_use;
      }
    }
  }
  if (!grads.params.empty()) {
    const auto device = flat_.device();
    grads.wait = [device, written = StreamEvent::of(optional_current_stream(device))] {
      const c10::DeviceGuard guard(device);
      written.synchronize();
    };
    reduced_grads_hook_(std::move(grads));
  }
}

/// True if all that is left to do is a copy to the host that the host does not wait for. Then
/// the reduced gradients need not stay on the device until the reduction is finished.
bool GradReducer::finishes_on_stream(const Reduction& reduction) const {
  const auto dtype = common_dtype(reduction.params);
  return flat_.offload() && flat_.offload()->pin_memory && has_streams(flat_.device()) &&
         !replicas_ && !all_reduce_hook_ && dtype && !are_read_at_once(reduction.params, *dtype);
}

/// Returns the reduced gradients in the dtype of the shards, if all have the same one, and in the
/// memory where shards are.
at::Tensor GradReducer::to_shards(const at::Tensor& flat, const Reduction& reduction) {
  at::NoGradGuard no_grad;
  const auto dtype = common_dtype(reduction.params);
  const auto cast = dtype ? flat.to(*dtype) : flat;
  if (cast.device() == flat_.shard().device()) {
    return cast;
  }
  const bool pinned = flat_.offload()->pin_memory;
  auto on_host = at::empty(cast.sizes(), cast.options().device(at::kCPU).pinned_memory(pinned));
  // If nobody reads it now, it may arrive as late as the end of backward.
  const bool used_now = are_read_at_once(reduction.params, cast.scalar_type());
  on_host.copy_(cast, /*non_blocking=*/pinned && !used_now);
  grads_on_host_ = StreamEvent::of(optional_current_stream(cast.device()));
  return on_host;
}

// ------------------------------------------------------------ Settings

void GradReducer::set_custom(std::shared_ptr<ReduceScatter> comm) {
  reduce_scatter_ = std::move(comm);
  is_custom_ = true;
}

void GradReducer::allocate_from_process_group(bool enable) {
  reduce_scatter_ = enable ? process_group_reduce_scatter(group_) : default_reduce_scatter();
}

void GradReducer::set_all_reduce_hook(
    std::function<void(at::Tensor&)> hook, OptionalStream stream) {
  TORCH_CHECK_VALUE(!stream || !replicas_, "stream cannot be set when using native HSDP");
  all_reduce_hook_ = std::move(hook);
  all_reduce_hook_stream_ = stream && has_streams(stream->device()) ? stream : std::nullopt;
}

void GradReducer::check_updated() const {
  if (reduced_grads_hook_) {
    for (const auto& param : flat_.params()) {
      param->check_updated("[fully_shard]");
    }
  }
}

void GradReducer::set_reduced_grads_hook(ReducedGradsHook hook) {
  reduced_grads_hook_ = std::move(hook);
  unreported_.clear();
}

void GradReducer::set_separate_group(bool enable) {
  std::vector<int> all(flat_.ranks().size());
  std::iota(all.begin(), all.end(), 0);
  group_ = enable && !flat_.alone() ? flat_.ranks().new_group(all, "fsdp_reduce_scatter")
                                    : flat_.ranks();
}

} // namespace fsdp::detail
