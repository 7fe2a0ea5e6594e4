#include <fsdp/clip_grad_norm.h>

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/irange.h>
#include <fsdp/error.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/text.h"
#include "param/fsdp_param.h"
#include "param/param_placement.h"
#include "runtime/range.h"

namespace fsdp {
namespace {

using detail::FSDPParam;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// One parameter and this rank's part of its gradient.
struct Part {
  std::size_t index; // in the caller's list
  at::Tensor param;
  const FSDPParam* manager;
  at::Tensor grad; // undefined if there is none
};

/// Parameters that are divided over the ranks of one group.
struct ShardedParams {
  ProcessGroup group;
  at::Device device; // that the group communicates on
  std::vector<std::size_t> parts;
};

std::string name_of(const Part& part) {
  const auto name = detail::name_of(part.param);
  return name.empty() ? c10::str("parameter #", part.index) : "'" + name + "'";
}

void check_grad(const Part& part) {
  if (!part.grad.defined()) {
    return;
  }
  TORCH_CHECK_VALUE(
      part.grad.layout() == at::kStrided, "[clip_grad_norm_] ", name_of(part),
      " has a gradient of layout ", part.grad.layout(),
      "; only dense ones can be clipped. Make an embedding without the option `sparse`.");
  if (part.manager) {
    const at::IntArrayRef expected = part.manager->geometry().shard_sizes;
    TORCH_CHECK_VALUE(
        part.grad.sizes() == expected, "[clip_grad_norm_] ", name_of(part),
        " has a gradient of sizes ", part.grad.sizes(), ", but its shard here has ", expected,
        ". Call zero_grad() after sharding a module.");
  }
}

/// Returns each parameter once, even if it is listed twice.
std::vector<Part> parts_of(const std::vector<at::Tensor>& params) {
  std::vector<Part> parts;
  ska::flat_hash_set<const void*> seen;
  for (const auto i : c10::irange(params.size())) {
    TORCH_CHECK_VALUE(
        params[i].defined(), "[clip_grad_norm_] parameter #", i, " is an undefined tensor");
    if (seen.insert(params[i].unsafeGetTensorImpl()).second) {
      const auto* manager = FSDPParam::find(params[i]);
      if (manager) {
        manager->check_updated("[clip_grad_norm_]");
      }
      parts.push_back({i, params[i], manager, params[i].grad()});
      check_grad(parts.back());
    }
  }
  return parts;
}

/// Returns the groups in the order of their first use, which is the same on every rank. Parameters
/// without a gradient are included, so that all ranks agree on the number of parts.
std::vector<ShardedParams> sharded_params_of(const std::vector<Part>& parts) {
  std::vector<ShardedParams> all_sharded;
  for (const auto i : c10::irange(parts.size())) {
    for (const auto& axis : detail::axes_of(parts[i].param)) {
      if (!axis.divides) {
        continue; // these ranks hold the same values
      }
      const auto found = std::find_if(
          all_sharded.begin(), all_sharded.end(),
          [&](const auto& sharded) { return sharded.group == axis.group; });
      if (found == all_sharded.end()) {
        all_sharded.push_back({axis.group, axis.device, {i}});
      } else {
        found->parts.push_back(i);
      }
    }
  }
  return all_sharded;
}

/// Gradients for one kernel call: of one device and dtype, none empty.
struct List {
  std::vector<at::Tensor> grads;
  std::vector<std::size_t> parts;
};
using Lists = std::map<std::tuple<at::DeviceType, at::DeviceIndex, at::ScalarType>, List>;

Lists lists_of(const std::vector<Part>& parts) {
  Lists lists;
  for (const auto i : c10::irange(parts.size())) {
    const auto& grad = parts[i].grad;
    if (grad.defined() && grad.numel() > 0) {
      auto& list = lists[{grad.device().type(), grad.device().index(), grad.scalar_type()}];
      list.grads.push_back(grad);
      list.parts.push_back(i);
    }
  }
  return lists;
}

/// Returns one norm (0D) per part, in double because a power of a norm easily leaves float's range.
std::vector<at::Tensor> norms_of(
    const Lists& lists, std::size_t num_parts, double order, at::Device device) {
  const auto options = at::TensorOptions(at::kDouble).device(device);
  // The norm of an empty part must not change the result. For a maximum or a sum it is zero; for a
  // minimum or a sum of negative powers it is infinity.
  const auto identity = at::full({}, order < 0 ? kInfinity : 0.0, options);
  std::vector<at::Tensor> norms(num_parts, identity);
  for (const auto& [key, list] : lists) {
    const bool is_reduced = at::isReducedFloatingType(std::get<2>(key));
    const auto dtype = is_reduced ? std::optional(at::kFloat) : std::nullopt;
    const auto some = at::stack(at::_foreach_norm(list.grads, order, dtype)).to(options).unbind();
    for (const auto i : c10::irange(some.size())) {
      norms[list.parts[i]] = some[i];
    }
  }
  return norms;
}

/// Returns the norms of whole parameters, given the norms (1D) of this rank's parts. Collective.
at::Tensor reduce(const at::Tensor& norms, double order, const ProcessGroup& group) {
  if (std::isinf(order)) {
    // Backends disagree on the maximum of a number and NaN, so NaNs are sent separately.
    const double sign = order > 0 ? 1 : -1;
    const auto is_nan = norms.isnan();
    const auto both = at::stack({norms.masked_fill(is_nan, 0), is_nan.to(at::kDouble) * sign});
    group.all_reduce(both, order > 0 ? ReduceOp::Max : ReduceOp::Min);
    return both[0].masked_fill(both[1] != 0, kNaN);
  }
  const auto sums = order == 0 ? norms : norms.pow(order);
  group.all_reduce(sums);
  return order == 0 ? sums : sums.pow(1 / order);
}

void check_finite(
    const at::Tensor& total,
    const at::Tensor& norms,
    const std::vector<Part>& parts,
    double order) {
  const auto value = total.item<double>();
  if (std::isfinite(value)) {
    return;
  }
  constexpr std::size_t kMostNames = 10;
  const auto values = norms.cpu();
  std::vector<std::string> names;
  for (const auto i : c10::irange(parts.size())) {
    if (!std::isfinite(values.const_data_ptr<double>()[i])) {
      names.push_back(name_of(parts[i]));
    }
  }
  const auto num_names = names.size();
  names.resize(std::min(num_names, kMostNames));
  FSDP_THROW(
      NonFiniteError, "[clip_grad_norm_] The total norm of order ", order, " is non-finite (",
      value, "), so the gradients cannot be clipped. ",
      names.empty() ? "Each is finite, but not their norm together"
                    : "Not finite: " + detail::join(names),
      num_names > kMostNames ? c10::str(" and ", num_names - kMostNames, " more") : "",
      ". They are as they were: skip this step and call zero_grad(), or set "
      "error_if_nonfinite = false to scale them by this norm anyway.");
}

at::Device first_device(const std::vector<Part>& parts, const std::vector<at::Tensor>& params) {
  for (const auto& part : parts) {
    if (part.grad.defined()) {
      return part.grad.device();
    }
  }
  return params.front().device();
}

} // namespace

at::Tensor clip_grad_norm_(
    const std::vector<at::Tensor>& params,
    double max_norm,
    double norm_type,
    bool error_if_nonfinite) {
  TORCH_CHECK_VALUE(
      max_norm >= 0, "[clip_grad_norm_] max_norm must be zero or more, got ", max_norm);
  TORCH_CHECK_VALUE(
      !std::isnan(norm_type), "[clip_grad_norm_] norm_type must be a number or infinity, got NaN");
  if (params.empty()) {
    return at::zeros({});
  }
  const detail::Range range("clip_grad_norm");
  at::NoGradGuard no_grad;
  const auto parts = parts_of(params);
  const auto lists = lists_of(parts);
  const auto device = first_device(parts, params);
  auto norms = norms_of(lists, parts.size(), norm_type, device);
  // A parameter that is divided along several axes is in several of these.
  for (const auto& sharded : sharded_params_of(parts)) {
    std::vector<at::Tensor> local;
    for (const auto i : sharded.parts) {
      local.push_back(norms[i]);
    }
    const auto whole =
        reduce(at::stack(local).to(sharded.device), norm_type, sharded.group).to(device).unbind();
    for (const auto i : c10::irange(whole.size())) {
      norms[sharded.parts[i]] = whole[i];
    }
  }

  const auto all = at::stack(norms);
  auto total = norm_type == 0 ? all.sum() : at::linalg_vector_norm(all, norm_type);
  bool any_grad = false;
  bool any_double = false;
  for (const auto& part : parts) {
    any_grad |= part.grad.defined();
    any_double |=
        part.grad.defined() && c10::toRealValueType(part.grad.scalar_type()) == at::kDouble;
  }
  if (!any_grad && norm_type < 0) {
    total = total.masked_fill(total.isinf(), 0); // no gradients: infinity is the identity
  }
  const auto result = total.to(any_double ? at::kDouble : at::kFloat);
  if (error_if_nonfinite) {
    check_finite(result, all, parts, norm_type);
  }
  // Multiplies even if the scale is 1: to read the scale, the host would wait for the device.
  const auto scale = (max_norm / (total + 1e-6)).clamp_max(1);
  for (const auto& [key, list] : lists) {
    const auto& grad = list.grads.front();
    at::_foreach_mul_(list.grads, scale.to(grad.device(), at::toOpMathType(grad.scalar_type())));
  }
  return result;
}

} // namespace fsdp
