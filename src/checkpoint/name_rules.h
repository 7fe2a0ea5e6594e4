#pragma once

#include <functional>
#include <string>
#include <vector>

#include <fsdp/checkpoint.h>

namespace fsdp::detail {

using Rename = std::function<std::string(const std::string& name)>;

/// Returns a function that renames by the first rule that matches all of the name, and returns the
/// name unchanged if no rule does. Throws ConfigError if a rule is not a regular expression.
Rename renaming_by(const std::vector<NameRule>& rules);

} // namespace fsdp::detail
