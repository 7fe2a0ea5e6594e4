#include <fsdp/grad_scaler.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/irange.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "param/fsdp_param.h"
#include "param/param_placement.h"
#include "runtime/object_in_use.h"

namespace fsdp {
namespace {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

void check_scale_value(const char* function, double scale) {
  using Limits = std::numeric_limits<float>; // the scale is kept in float32
  TORCH_CHECK_VALUE(
      scale >= Limits::min() && scale <= Limits::max(), "[GradScaler::", function,
      "] the scale must be positive and finite in float32, got ", scale);
}

void check_grad(const at::Tensor& param, std::size_t group, std::size_t index) {
  const auto name = [&] {
    const auto name = detail::name_of(param);
    return name.empty() ? c10::str("parameter ", index, " of group ", group) : "'" + name + "'";
  };
  const auto& grad = param.grad();
  TORCH_CHECK_VALUE(
      grad.scalar_type() != at::kHalf,
      "[GradScaler] Attempting to unscale FP16 gradients: that of ", name(),
      ". They would be out of range again. Keep the parameters in float32 and compute in fp16: "
      "fully_shard(module, {.mp_policy = {.param_dtype = torch::kHalf}}).");
  TORCH_CHECK_VALUE(
      grad.layout() == at::kStrided, "[GradScaler] ", name(), " has a gradient of layout ",
      grad.layout(),
      "; only dense ones can be unscaled. Make an embedding without the option `sparse`.");
}

/// Gradients by device and dtype, each once even if its parameter is listed twice.
using GradLists =
    std::map<std::tuple<at::DeviceType, at::DeviceIndex, at::ScalarType>, std::vector<at::Tensor>>;

GradLists grad_lists(const ParamGroups& groups) {
  GradLists lists;
  ska::flat_hash_set<const void*> seen;
  for (const auto group : c10::irange(groups.size())) {
    const auto& params = groups[group].params();
    for (const auto index : c10::irange(params.size())) {
      const auto& param = params[index];
      if (const auto* manager = detail::FSDPParam::find(param)) {
        manager->check_updated("[GradScaler]");
      }
      const auto& grad = param.grad();
      if (grad.defined() && seen.insert(param.unsafeGetTensorImpl()).second) {
        check_grad(param, group, index);
        lists[{grad.device().type(), grad.device().index(), grad.scalar_type()}].push_back(grad);
      }
    }
  }
  return lists;
}

/// Returns the maximum of `flag` over all ranks that share a parameter. Parameters without a
/// gradient count too, so that every rank makes the same calls.
at::Tensor reduce_flag(at::Tensor flag, const ParamGroups& groups) {
  const auto home = flag.device();
  std::vector<ProcessGroup> done;
  for (const auto& group : groups) {
    for (const auto& param : group.params()) {
      // Includes replicas, because all ranks that hold a part of a parameter step together.
      for (const auto& axis : detail::axes_of(param)) {
        if (std::find(done.begin(), done.end(), axis.group) == done.end()) {
          flag = flag.to(axis.device);
          axis.group.all_reduce(flag, ReduceOp::Max);
          done.push_back(axis.group);
        }
      }
    }
  }
  return flag.to(home);
}

} // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options), initial_{.scale = options.init_scale} {
  if (!options.enabled) {
    return;
  }
  check_scale_value("GradScaler", options.init_scale);
  TORCH_CHECK_VALUE(
      options.growth_factor > 1, "[GradScaler] growth_factor must be more than 1, got ",
      options.growth_factor);
  TORCH_CHECK_VALUE(
      options.backoff_factor > 0 && options.backoff_factor < 1,
      "[GradScaler] backoff_factor must be between 0 and 1, got ", options.backoff_factor);
  TORCH_CHECK_VALUE(
      options.growth_interval > 0, "[GradScaler] growth_interval must be positive, got ",
      options.growth_interval);
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!options_.enabled) {
    return loss;
  }
  TORCH_CHECK_VALUE(loss.defined(), "[GradScaler::scale] the loss is an undefined tensor");
  if (!scale_.defined()) {
    const auto options = at::TensorOptions(loss.device());
    scale_ = at::full({}, initial_.scale, options.dtype(at::kFloat));
    growth_tracker_ = at::full({}, initial_.growth_tracker, options.dtype(at::kInt));
  }
  return loss * scale_.to(loss.device(), /*non_blocking=*/true);
}

void GradScaler::check_scale(const char* function) const {
  TORCH_CHECK(
      scale_.defined(), "[GradScaler::", function,
      "] there is no scale yet: call scale(loss) earlier in the iteration");
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    return;
  }
  TORCH_CHECK(
      !detail::is_in_use(&optimizer),
      "[GradScaler] a StepInBackward updates the parameters of this optimizer in backward, before "
      "all gradients are known; remove the StepInBackward, and call scaler.step() after backward");
  check_scale("unscale_");
  if (const auto known = optimizers_.find(&optimizer); known != optimizers_.end()) {
    TORCH_CHECK(
        known->second.stage != Stage::Unscaled,
        "[GradScaler] unscale_() has already been called on this optimizer since the last "
        "update()");
    TORCH_CHECK(
        known->second.stage != Stage::Stepped,
        "[GradScaler] unscale_() is being called after step(); call update() in between");
  }
  at::NoGradGuard no_grad;
  const auto lists = grad_lists(optimizer.param_groups());
  const auto inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  auto found_inf = at::zeros({1}, inverse.options());
  for (const auto& [key, grads] : lists) {
    // Offloaded gradients are on another device than the loss.
    const auto device = grads.front().device();
    auto found_here = at::zeros({1}, inverse.options().device(device));
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found_here, inverse.to(device));
    found_inf = at::maximum(found_inf, found_here.to(found_inf.device()));
  }
  optimizers_[&optimizer] = {
      .stage = Stage::Unscaled, .found_inf = reduce_flag(found_inf, optimizer.param_groups())};
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  check_scale("step");
  auto known = optimizers_.find(&optimizer);
  if (known == optimizers_.end()) {
    unscale_(optimizer);
    known = optimizers_.find(&optimizer);
  }
  auto& progress = known->second;
  TORCH_CHECK(
      progress.stage != Stage::Stepped,
      "[GradScaler] step() has already been called on this optimizer since the last update()");
  const bool is_finite = progress.found_inf.item<float>() == 0;
  if (is_finite) {
    optimizer.step();
  }
  progress.stage = Stage::Stepped;
  return is_finite;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) {
    return;
  }
  check_scale("update");
  at::NoGradGuard no_grad;
  if (new_scale) {
    check_scale_value("update", *new_scale);
    scale_.fill_(*new_scale);
  } else {
    TORCH_CHECK(
        !optimizers_.empty(),
        "[GradScaler] No inf checks were recorded prior to update(): call step(optimizer) first");
    auto found_inf = at::zeros({1}, scale_.options());
    for (const auto& [optimizer, progress] : optimizers_) {
      found_inf = at::maximum(found_inf, progress.found_inf);
    }
    at::_amp_update_scale_(
        scale_, growth_tracker_, found_inf, options_.growth_factor, options_.backoff_factor,
        options_.growth_interval);
  }
  optimizers_.clear();
}

double GradScaler::get_scale() const {
  return options_.enabled ? state().scale : 1;
}

GradScaler::State GradScaler::state() const {
  if (!options_.enabled) {
    return {};
  }
  return scale_.defined()
             ? State{.scale = scale_.item<double>(), .growth_tracker = growth_tracker_.item<int>()}
             : initial_;
}

void GradScaler::load_state(const State& state) {
  if (!options_.enabled) {
    return;
  }
  check_scale_value("load_state", state.scale);
  TORCH_CHECK_VALUE(
      state.growth_tracker >= 0,
      "[GradScaler::load_state] growth_tracker must not be negative, got ", state.growth_tracker);
  initial_ = state;
  if (scale_.defined()) {
    scale_.fill_(state.scale);
    growth_tracker_.fill_(state.growth_tracker);
  }
}

} // namespace fsdp
