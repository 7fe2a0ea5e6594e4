#include "observe.h"

#include <fsdp/memory.h>
#include <fsdp/trace.h>

#include <memory>
#include <string>
#include <thread>

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
      (void)trace_.release();
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

} // namespace

void bind_observers(py::module_& m) {
  m.def("memory_stats", &stats_of);
  m.def("reset_peak_memory_stats", &reset_peak_memory_stats);
  py::class_<OwnedTrace>(m, "Trace")
      .def(py::init<c10::Device, bool>())
      .def("begin_step", [](OwnedTrace& trace, int64_t step) { trace.get().begin_step(step); })
      .def("waited_s", [](OwnedTrace& trace) { return trace.get().waited_s(); })
      .def("json", [](OwnedTrace& trace) { return trace.get().json(); });
}

} // namespace fsdp::python
