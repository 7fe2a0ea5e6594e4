// The module fsdp_cpp._C: what the Python files of the package need of the engine.
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "arguments.h"
#include "checkpoint.h"
#include "custom_comm.h"
#include "dtensor_param.h"
#include "low_precision.h"
#include "module_state.h"
#include "muon.h"
#include "observe.h"
#include "opaque_param.h"
#include "process_groups.h"

namespace fsdp::python {

namespace {

/// c10::Error and python_error become the errors that torch makes of them.
void translate_exceptions(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const py::error_already_set&) {
    throw;
  } catch (const py::builtin_exception&) {
    throw;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

void bind_specs(py::module_& m) {
  using Dtype = std::optional<at::ScalarType>;
  py::class_<MeshSpec>(m, "MeshSpec")
      .def(py::init([](std::string device_type, std::vector<GivenGroup> groups,
                       std::vector<std::vector<int>> group_ranks, std::vector<int> ranks,
                       std::vector<std::string> names) {
        return MeshSpec{
            std::move(device_type), std::move(groups), std::move(group_ranks), std::move(ranks),
            std::move(names)};
      }));
  py::class_<GroupSpec>(m, "GroupSpec")
      .def(
          py::init([](MeshSpec mesh, bool replicated,
                      const std::vector<std::tuple<std::string, at::Tensor, int64_t, bool>>& params,
                      int ranks_after_forward) {
            GroupSpec spec{std::move(mesh), replicated, {}, ranks_after_forward};
            for (const auto& [name, whole, dim, opaque] : params) {
              spec.params.push_back({whole, name, dim, opaque});
            }
            return spec;
          }));
  py::class_<PolicySpec>(m, "PolicySpec")
      .def(py::init([](Dtype param_dtype, Dtype reduce_dtype, Dtype output_dtype,
                       bool cast_forward_inputs, std::optional<bool> offload) {
        PolicySpec spec;
        spec.precision.param_dtype = param_dtype;
        spec.precision.reduce_dtype = reduce_dtype;
        spec.precision.output_dtype = output_dtype;
        spec.precision.cast_forward_inputs = cast_forward_inputs;
        spec.offload = offload;
        return spec;
      }));
}

/// Functions of FSDPModule with one or two arguments.
template <class... Args>
auto setter(void (FSDPModule::*set)(Args...)) {
  return [set](const ModuleState& state, const std::decay_t<Args>&... args) {
    (state.handle().*set)(args...);
  };
}

std::vector<FSDPModule> handles_of(const std::vector<std::shared_ptr<ModuleState>>& states) {
  std::vector<FSDPModule> handles;
  for (const auto& state : states) {
    TORCH_CHECK_TYPE(state, "None is not a state");
    handles.push_back(state->handle());
  }
  return handles;
}

void bind_state(py::module_& m) {
  using States = std::vector<std::shared_ptr<ModuleState>>;
  using Set = FSDPModule;
  py::class_<ModuleState, std::shared_ptr<ModuleState>>(m, "State")
      .def(py::init<
           const std::string&, const std::vector<py::object>&, const std::string&,
           const GivenGroup&, const std::vector<GroupSpec>&, const PolicySpec&, bool, py::object>())
      .def("bind", &ModuleState::bind)
      .def("shard", &ModuleState::shard)
      .def(
          "pre_forward",
          [](ModuleState& state, py::handle module, py::handle args, py::handle kwargs) {
            return state.pre_forward(module.ptr(), args.ptr(), kwargs.ptr());
          })
      .def(
          "post_forward",
          [](ModuleState& state, py::handle module, py::handle output) {
            return state.post_forward(module.ptr(), output.ptr());
          })
      .def(
          "forward_failed", [](ModuleState& state, py::handle module,
                               bool stopped) { state.forward_failed(module.ptr(), stopped); })
      .def("reset", &ModuleState::reset)
      .def("finish_backward", [](const ModuleState& state) { state.engine()->finish_backward(); })
      .def("unshard", [](const ModuleState& state) { state.engine()->unshard(); })
      .def("wait_for_unshard", [](const ModuleState& state) { state.engine()->wait_for_unshard(); })
      .def("reshard", [](const ModuleState& state) { state.engine()->reshard(); })
      .def("show_shards", &ModuleState::show_shards)
      .def("adopt", &ModuleState::adopt)
      .def("set_is_last_backward", setter(&Set::set_is_last_backward))
      .def("set_requires_gradient_sync", setter(&Set::set_requires_gradient_sync))
      .def("set_requires_all_reduce", setter(&Set::set_requires_all_reduce))
      .def("set_reshard_after_forward", setter(&Set::set_reshard_after_forward))
      .def("set_reshard_after_backward", setter(&Set::set_reshard_after_backward))
      .def("set_unshard_in_backward", setter(&Set::set_unshard_in_backward))
      .def("set_gradient_divide_factor", setter(&Set::set_gradient_divide_factor))
      .def("set_force_sum_reduction_for_comms", setter(&Set::set_force_sum_reduction_for_comms))
      .def("set_reduce_scatter_unused_params", setter(&Set::set_reduce_scatter_unused_params))
      .def(
          "set_reduce_scatter_max_input_buffers",
          setter<int, bool>(&Set::set_reduce_scatter_max_input_buffers))
      .def("set_separate_reduce_scatter_group", setter(&Set::set_separate_reduce_scatter_group))
      .def(
          "set_allocate_memory_from_process_group_for_comm",
          setter(&Set::set_allocate_memory_from_process_group_for_comm))
      .def("set_symm_mem_for_comm", setter(&Set::set_symm_mem_for_comm))
      .def(
          "set_modules_to_forward_prefetch",
          [](const ModuleState& state, const States& modules) {
            state.handle().set_modules_to_forward_prefetch(handles_of(modules));
          })
      .def(
          "set_modules_to_backward_prefetch",
          [](const ModuleState& state, const States& modules) {
            state.handle().set_modules_to_backward_prefetch(handles_of(modules));
          })
      .def(
          "set_post_optim_event", // after all that is in the stream now
          [](const ModuleState& state, const c10::Stream& stream) {
            c10::Event event(stream.device_type());
            event.record(stream);
            state.handle().set_post_optim_event(std::move(event));
          })
      .def(
          "set_custom_all_gather",
          [](const ModuleState& state, py::object comm) {
            state.handle().set_custom_all_gather(python_all_gather(std::move(comm)));
          })
      .def(
          "set_custom_reduce_scatter",
          [](const ModuleState& state, py::object comm) {
            state.handle().set_custom_reduce_scatter(python_reduce_scatter(std::move(comm)));
          })
      .def(
          "set_all_reduce_hook",
          [](const ModuleState& state, py::object hook, std::optional<c10::Stream> stream,
             bool on_cpu) {
            if (on_cpu) {
              stream = c10::Stream(c10::Stream::DEFAULT, c10::Device(at::kCPU));
            }
            state.handle().set_all_reduce_hook(python_all_reduce_hook(std::move(hook)), stream);
          })
      .def("set_reduced_grads_hook", [](const ModuleState& state, py::object hook, bool recurse) {
        state.handle().set_reduced_grads_hook(python_reduced_grads_hook(std::move(hook)), recurse);
      });
  py::class_<ReducedGrads>(m, "ReducedGrads")
      .def_readonly("params", &ReducedGrads::params)
      .def(
          "wait", [](const ReducedGrads& grads) { grads.wait(); },
          py::call_guard<py::gil_scoped_release>())
      .def("release", [](ReducedGrads& grads) { grads.in_use.reset(); });
  m.def("share_comm_ctx", [](const States& modules) { share_comm_ctx(handles_of(modules)); });
  m.def("forward_hooks", &forward_hooks);
}

} // namespace

} // namespace fsdp::python

PYBIND11_MODULE(_C, m) {
  using namespace fsdp::python;
  py::register_local_exception_translator(translate_exceptions);
  m.def("set_new_group", &set_new_group);
  m.def("set_dtensor_class", &set_dtensor_class);
  m.def("move_memory", &move_memory);
  m.def("set_tree_functions", &set_tree_functions);
  bind_specs(m);
  bind_state(m);
  bind_observers(m);
  bind_checkpoints(m);
  bind_low_precision(m);
  bind_muon(m);
}
