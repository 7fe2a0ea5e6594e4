#pragma once

#include <string>

#include "cli/fuzz/case.h"

namespace fsdp::cli::fuzz {

/// A C++ program that does what the case says and throws where the models differ. It needs nothing
/// but the installed library. `failure` is written into its first lines.
std::string program(const Case& c, const std::string& failure);

} // namespace fsdp::cli::fuzz
