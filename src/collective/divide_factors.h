#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include <fsdp/reduce_op.h>

namespace fsdp::detail {

/// The number of ranks that gradients are averaged over, and the dtype for it.
struct DivideRequest {
  c10::ScalarType reduce_dtype = c10::kFloat;
  int64_t shard_size = 1;
  int64_t replicate_size = 1;
  std::optional<double> factor = std::nullopt; // the user's divisor instead of the number of ranks
  bool force_sum = false;                      // use no other collectives than sums
};

/// Says how the division is spread over a reduction. A factor of 1 is left empty, because it needs
/// no kernel.
struct DivideFactors {
  std::optional<double> pre;  // divides the reduce-scatter input
  std::optional<double> post; // divides the result
  ReduceOp reduce_scatter_op;
  ReduceOp all_reduce_op;
};

/// In fp32 and bf16 the collective itself divides, or, with `force_sum`, the result is divided.
/// Other dtypes are divided in two steps of about the same size, the first by a power of two,
/// because in fp16 the sum may overflow and the quotient may underflow.
DivideFactors divide_factors(const DivideRequest& request);

} // namespace fsdp::detail
