#pragma once

#include <functional>
#include <vector>

#include "cli/fuzz/case.h"

namespace fsdp::cli::fuzz {

/// The cases that are simpler than `c` in one respect, the most different ones first.
std::vector<Case> simpler_cases(const Case& c);

/// Makes a case as simple as it can be while `fails` returns true for it. Calls `fails` at most
/// `max_calls` times.
Case shrink(Case c, const std::function<bool(const Case&)>& fails, int max_calls = 1000);

} // namespace fsdp::cli::fuzz
