#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/text/examples.h"

namespace fsdp::cli {

/// Puts examples into rows of `context` + 1 tokens, as many into each as fit, in their order. What
/// is left of a row is padding. Returns the tokens of all rows with their flags; see `kIsGiven`.
/// Throws ConfigError that names --data, `path` and the longest example if one does not fit.
std::vector<int32_t> pack_examples(
    const std::vector<Example>& examples, const std::string& path, int64_t context);

} // namespace fsdp::cli
