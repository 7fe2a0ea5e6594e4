#pragma once

#include <functional>
#include <regex>
#include <string>
#include <vector>

#include <fsdp/checkpoint.h>

namespace fsdp::detail {

/// Compiles a regular expression that a user wrote. Matching takes a time that is at most the
/// length of the pattern times the length of the name. Throws ConfigError that begins with `what`
/// if the text is not a regular expression, is too long, or has a back-reference, for which no such
/// bound is known.
std::regex user_pattern(const std::string& text, const std::string& what);

using Rename = std::function<std::string(const std::string& name)>;

/// Returns a function that renames by the first rule that matches all of the name, and returns the
/// name unchanged if no rule does. Throws ConfigError if a rule is not a regular expression.
Rename renaming_by(const std::vector<NameRule>& rules);

} // namespace fsdp::detail
