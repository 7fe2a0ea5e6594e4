#pragma once

#include "interpreter.h"

namespace fsdp::python {

/// Adds to the module what writes and reads checkpoints.
void bind_checkpoints(py::module_& m);

} // namespace fsdp::python
