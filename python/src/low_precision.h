#pragma once

#include "interpreter.h"

namespace fsdp::python {

/// Adds to the module what LowPrecisionAdamW needs.
void bind_low_precision(py::module_& m);

} // namespace fsdp::python
