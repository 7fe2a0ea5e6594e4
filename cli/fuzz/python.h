#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cli/fuzz/case.h"
#include "cli/fuzz/run.h"

namespace fsdp::cli::fuzz {

/// A case, and the final parameters of its run in C++.
struct ForPython {
  Case c;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
};

struct PythonResult {
  std::string missing = {}; // why nothing was compared
  int64_t num_cases = 0;
  std::vector<std::pair<Case, Failure>> failures = {};
};

/// True if Python's FSDP2 can run the case, and the script can.
bool fits_python(const Case& c);

/// Runs the cases with Python's FSDP2 for about `seconds`, and compares the final parameters. The
/// interpreter is FSDP_PYTHON of the environment, else python3.
PythonResult run_python(const std::vector<ForPython>& cases, double seconds);

} // namespace fsdp::cli::fuzz
