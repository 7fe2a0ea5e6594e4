#include "muon.h"

#include <ATen/core/grad_mode.h>
#include <fsdp/dtensor.h>
#include <fsdp/muon.h>

#include <optional>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "optim/matrix_steps.h"

namespace fsdp::python {

namespace {

using optim::MuonOptions;

/// Its group and index, a parameter, its gradient if there is one, and its momentum for `run`.
using Update = std::tuple<
    size_t,
    size_t,
    std::variant<at::Tensor, DTensor>,
    std::optional<at::Tensor>,
    std::optional<at::Tensor>>;

MuonOptions options_of(
    double lr,
    double weight_decay,
    double momentum,
    bool nesterov,
    const MuonOptions::Coefficients& ns_coefficients,
    double eps,
    int64_t ns_steps,
    bool match_rms_adamw,
    at::ScalarType ns_dtype,
    int64_t blocks,
    const MuonOptions::Betas& betas,
    double adamw_eps) {
  auto options = MuonOptions(lr)
                     .weight_decay(weight_decay)
                     .momentum(momentum)
                     .nesterov(nesterov)
                     .ns_coefficients(ns_coefficients)
                     .eps(eps)
                     .ns_steps(ns_steps)
                     .match_rms_adamw(match_rms_adamw)
                     .ns_dtype(ns_dtype)
                     .blocks(blocks)
                     .betas(betas)
                     .adamw_eps(adamw_eps);
  detail::check_options(options);
  return options;
}

/// `options` are those of each group.
std::vector<detail::MatrixUpdate> updates_of(
    const std::vector<Update>& given, const std::vector<MuonOptions>& options) {
  std::vector<detail::MatrixUpdate> updates;
  for (const auto& [group, index, param, grad, momentum] : given) {
    detail::MatrixUpdate update{
        .group = group,
        .index = index,
        .grad = grad.value_or(at::Tensor()),
        .options = &options.at(group),
        .momentum = momentum.value_or(at::Tensor())};
    if (const auto* spread = std::get_if<DTensor>(&param)) {
      update.param = spread->to_local();
      update.spec = {spread->device_mesh(), spread->placements(), spread->sizes().vec()};
    } else {
      update.param = std::get<at::Tensor>(param);
    }
    updates.push_back(std::move(update));
  }
  return updates;
}

void prepare(
    detail::MatrixSteps& steps,
    const std::vector<Update>& updates,
    const std::vector<MuonOptions>& options) {
  steps.prepare(updates_of(updates, options));
}

void run(
    detail::MatrixSteps& steps,
    const std::vector<Update>& updates,
    const std::vector<MuonOptions>& options) {
  at::NoGradGuard no_grad;
  steps.run(updates_of(updates, options));
}

} // namespace

void bind_muon(py::module_& m) {
  using Unlocking = py::call_guard<py::gil_scoped_release>;
  py::class_<MuonOptions>(m, "MuonOptions").def(py::init(&options_of));
  py::class_<detail::MatrixSteps>(m, "MatrixSteps")
      .def(py::init())
      .def("prepare", &prepare, Unlocking())
      .def("run", &run, Unlocking())
      .def("set_exchange_numel", &detail::MatrixSteps::set_exchange_numel);
}

} // namespace fsdp::python
