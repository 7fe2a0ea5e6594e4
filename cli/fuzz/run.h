#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "cli/fuzz/case.h"

namespace fsdp::cli::fuzz {

struct Failure {
  std::string kind;    // the same for failures of the same sort
  std::string message; // with all details
};

struct Outcome {
  std::optional<Failure> failure = {};
  int64_t num_comparisons = 0;
  /// Whole, by name, after the last step.
  std::vector<std::pair<std::string, at::Tensor>> parameters = {};
};

/// Runs a case with ranks as threads. Never throws because of the case.
Outcome run_case(const Case& c);

} // namespace fsdp::cli::fuzz
