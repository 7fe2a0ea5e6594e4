#pragma once

#include <optional>
#include <string>

#include "cli/train/model.h"

namespace fsdp::cli {

/// The floating-point operations that the model needs per token, forward and backward: 6 for each
/// weight of a matrix that a token meets, and 12 for each pair of a token that attention sees and
/// an element of its queries. Half of these pairs are in the future, but count, as is usual. What
/// is computed again does not count.
double flops_per_token(const ModelDims& dims, int64_t context);

/// The most operations per second of a GPU with this name, in products of dense matrices of that
/// dtype. Empty if it is not known.
std::optional<double> peak_flops(const std::string& gpu, const std::string& dtype);
/// A line with the name of the machine's first GPU. Empty if there is none, or its driver does not
/// tell.
std::string gpu_name();

} // namespace fsdp::cli
