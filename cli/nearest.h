#pragma once

#include <string>
#include <vector>

namespace fsdp::cli {

/// Returns "; did you mean 'x'?" if one of `known` is similar to `word`, else "; there are: x, y".
std::string did_you_mean(const std::string& word, const std::vector<std::string>& known);

/// The known word that differs in the fewest letters. Empty if none is similar.
std::string nearest(const std::string& word, const std::vector<std::string>& known);

} // namespace fsdp::cli
