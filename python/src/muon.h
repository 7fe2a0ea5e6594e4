#pragma once

#include "interpreter.h"

namespace fsdp::python {

/// Adds to the module what Muon needs.
void bind_muon(py::module_& m);

} // namespace fsdp::python
