#include "low_precision.h"

#include <ATen/core/grad_mode.h>
#include <fsdp/dtensor.h>
#include <fsdp/low_precision_adamw.h>

#include <optional>
#include <tuple>
#include <utility>
#include <variant>

#include "optim/low_precision_step.h"

namespace fsdp::python {

namespace {

using optim::LowPrecisionAdamWOptions;

/// The values of a moment, and the scales of an 8-bit one.
using StoredMoment = std::pair<at::Tensor, std::optional<at::Tensor>>;

/// Calls `use` with the moment that `stored` holds.
template <class Use>
auto with_moment(const StoredMoment& stored, bool is_square, const Use& use) {
  auto values = stored.first;
  auto scale = stored.second.value_or(at::Tensor());
  return use(detail::Moment{values, scale, is_square});
}

LowPrecisionAdamWOptions low_precision_options(
    double lr,
    const LowPrecisionAdamWOptions::Betas& betas,
    double eps,
    double weight_decay,
    at::ScalarType moments,
    bool stochastic_rounding,
    int64_t seed) {
  auto options = LowPrecisionAdamWOptions(lr)
                     .betas(betas)
                     .eps(eps)
                     .weight_decay(weight_decay)
                     .moments(moments)
                     .stochastic_rounding(stochastic_rounding)
                     .seed(seed);
  detail::check(options);
  return options;
}

/// The moment of a parameter that has these floats, or zeros.
StoredMoment pack_moment(
    const at::Tensor& param,
    at::ScalarType dtype,
    bool is_square,
    const std::optional<at::Tensor>& floats) {
  at::NoGradGuard no_grad;
  at::Tensor values;
  at::Tensor scale;
  const detail::Moment moment{values, scale, is_square};
  moment.make(param, dtype);
  if (floats) {
    moment.write(0, floats->to(at::kFloat, false, /*copy=*/true).flatten(), /*random_bits=*/{});
  }
  return {values, scale.defined() ? std::optional(scale) : std::nullopt};
}

/// The moment as floats.
at::Tensor unpack_moment(const StoredMoment& stored, bool is_square) {
  at::NoGradGuard no_grad;
  return with_moment(stored, is_square, [](const detail::Moment& moment) {
    return moment.read(0, moment.values.numel()).view(moment.values.sizes());
  });
}

void low_precision_step(
    std::tuple<size_t, size_t> number, // of the group, and in the group
    const std::variant<at::Tensor, DTensor>& param,
    const at::Tensor& grad,
    const StoredMoment& exp_avg,
    const StoredMoment& exp_avg_sq,
    int64_t num_steps,
    const LowPrecisionAdamWOptions& options) {
  at::NoGradGuard no_grad;
  const auto* spread = std::get_if<DTensor>(&param);
  const auto local = spread ? spread->to_local() : std::get<at::Tensor>(param);
  std::optional<detail::TensorSpec> spec;
  if (spread) {
    spec = {spread->device_mesh(), spread->placements(), spread->sizes().vec()};
  }
  with_moment(exp_avg, false, [&](const detail::Moment& first) {
    with_moment(exp_avg_sq, true, [&](const detail::Moment& second) {
      const auto [group, index] = number;
      detail::run({group, index, local, grad, spec, {first, second}, num_steps}, options);
    });
  });
}

} // namespace

void bind_low_precision(py::module_& m) {
  using Unlocking = py::call_guard<py::gil_scoped_release>;
  py::class_<LowPrecisionAdamWOptions>(m, "LowPrecisionAdamWOptions")
      .def(py::init(&low_precision_options));
  m.def("pack_moment", &pack_moment, Unlocking());
  m.def("unpack_moment", &unpack_moment, Unlocking());
  m.def("low_precision_step", &low_precision_step, Unlocking());
}

} // namespace fsdp::python
