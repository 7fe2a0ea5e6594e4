#include "collective/divide_factors.h"

#include <cmath>

namespace fsdp::detail {

namespace {

/// Returns a power of two near the square root of `factor`, or a smaller one if `factor` has few
/// factors of two.
double first_step(double factor) {
  double step = 1;
  while (std::fmod(factor, step) == 0 && factor / step > step) {
    step *= 2;
  }
  return step;
}

std::optional<double> unless_one(double factor) {
  return factor == 1 ? std::nullopt : std::optional(factor);
}

} // namespace

DivideFactors divide_factors(const DivideRequest& request) {
  const auto num_ranks = static_cast<double>(request.shard_size * request.replicate_size);
  const double factor = request.factor.value_or(num_ranks);
  const bool may_overflow =
      request.reduce_dtype != c10::kFloat && request.reduce_dtype != c10::kBFloat16;
  DivideFactors result;
  if (may_overflow) {
    const double pre = first_step(factor);
    result.pre = unless_one(pre);
    result.post = unless_one(factor / pre);
  } else if (request.force_sum) {
    // Divides the result, which has fewer elements than the input.
    result.post = unless_one(factor);
  } else if (!request.factor) {
    if (num_ranks > 1) {
      result.reduce_scatter_op = ReduceOp::Avg;
      result.all_reduce_op = ReduceOp::Avg;
    }
  } else if (*request.factor == static_cast<double>(request.shard_size)) {
    result.reduce_scatter_op = ReduceOp::Avg;
  } else {
    result.reduce_scatter_op = ReduceOp::premul_sum(1 / *request.factor);
  }
  return result;
}

} // namespace fsdp::detail
