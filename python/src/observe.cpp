#include "observe.h"

#include <fsdp/memory.h>
#include <fsdp/sharding_plan.h>
#include <fsdp/trace.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cli/report/report.h"
#include "module_state.h"

namespace fsdp::python {

namespace {

/// A Trace must be destroyed by the thread that made it, but Python drops objects in any thread.
/// One that is dropped elsewhere stays.
class OwnedTrace {
 public:
  OwnedTrace(c10::Device device, bool memory)
      : trace_(std::make_unique<Trace>(TraceOptions{.device = device, .memory = memory})) {}
  ~OwnedTrace() {
    if (std::this_thread::get_id() != owner_) {
      (void)trace_.release(); // NOLINT(bugprone-unused-return-value): a leak is harmless here
    }
  }
  OwnedTrace(const OwnedTrace&) = delete;
  OwnedTrace& operator=(const OwnedTrace&) = delete;

  Trace& get() const {
    TORCH_CHECK(
        std::this_thread::get_id() == owner_, "[Trace] is used by another thread than its own");
    return *trace_;
  }

 private:
  const std::thread::id owner_ = std::this_thread::get_id();
  std::unique_ptr<Trace> trace_;
};

py::dict stats_of(c10::Device device) {
  const auto stats = memory_stats(device);
  py::dict result;
  result["shards"] = stats.shards;
  result["gathered"] = stats.gathered;
  result["gradients"] = stats.gradients;
  result["communication"] = stats.communication;
  result["other"] = stats.other;
  result["allocated"] = stats.allocated;
  result["peak"] = stats.peak;
  return result;
}

using NamedStates = std::vector<std::pair<std::string, std::shared_ptr<ModuleState>>>;

ShardingPlan plan_of(const NamedStates& modules) {
  detail::Subtree tree;
  for (const auto& [name, state] : modules) {
    tree.nodes.push_back({name, nullptr, state->engine()});
  }
  return detail::FSDPState::plan_of(tree);
}

void bind_plans(py::module_& m) {
  using Group = ShardingPlan::Group;
  py::class_<Group>(m, "GroupPlan")
      .def_readonly("module", &Group::module)
      .def_readonly("num_params", &Group::num_params)
      .def_readonly("numel", &Group::numel)
      .def_readonly("shard_bytes", &Group::shard_bytes)
      .def_readonly("on_host", &Group::on_host)
      .def_readonly("gathered_bytes", &Group::gathered_bytes)
      .def_readonly("padding_bytes", &Group::padding_bytes)
      .def_readonly("all_gathers", &Group::all_gathers)
      .def_readonly("all_gather_bytes", &Group::all_gather_bytes)
      .def_readonly("reduce_scatters", &Group::reduce_scatters)
      .def_readonly("reduce_scatter_bytes", &Group::reduce_scatter_bytes)
      .def_readonly("all_reduces", &Group::all_reduces)
      .def_readonly("all_reduce_bytes", &Group::all_reduce_bytes);
  py::class_<ShardingPlan>(m, "ShardingPlan")
      .def_readonly("groups", &ShardingPlan::groups)
      .def("total", &ShardingPlan::total)
      .def("__repr__", &ShardingPlan::str);
  m.def("sharding_plan", &plan_of);
}

} // namespace

void bind_observers(py::module_& m) {
  bind_plans(m);
  m.def("write_report", [](const std::string& run) { return cli::write_report(run).string(); });
  m.def("memory_stats", &stats_of);
  m.def("reset_peak_memory_stats", &reset_peak_memory_stats);
  py::class_<OwnedTrace>(m, "Trace")
      .def(py::init<c10::Device, bool>())
      .def("begin_step", [](OwnedTrace& trace, int64_t step) { trace.get().begin_step(step); })
      .def("waited_s", [](OwnedTrace& trace) { return trace.get().waited_s(); })
      .def("json", [](OwnedTrace& trace) { return trace.get().json(); });
}

} // namespace fsdp::python
