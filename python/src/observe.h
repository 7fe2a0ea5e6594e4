#pragma once

#include "interpreter.h"

namespace fsdp::python {

/// Binds sharding_plan, memory_stats, Trace and write_report.
void bind_observers(py::module_& m);

} // namespace fsdp::python
