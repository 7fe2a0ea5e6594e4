#pragma once

#include "interpreter.h"

namespace fsdp::python {

/// Binds sharding_plan, memory_stats and Trace.
void bind_observers(py::module_& m);

} // namespace fsdp::python
