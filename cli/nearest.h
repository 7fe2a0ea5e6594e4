#pragma once

#include <string>
#include <vector>

namespace fsdp::cli {

/// "; did you mean 'x'?" where one of `known` is near to `word`, else "; there
/// are: x, y".
std::string did_you_mean(const std::string& word, const std::vector<std::string>& known);

/// The one that takes the fewest changed letters; empty where none is near.
std::string nearest(const std::string& word, const std::vector<std::string>& known);

} // namespace fsdp::cli
