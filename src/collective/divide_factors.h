#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include <fsdp/reduce_op.h>

namespace fsdp::detail {

/// Over whom gradients are averaged, and in which dtype.
struct DivideRequest {
  c10::ScalarType reduce_dtype = c10::kFloat;
  int64_t shard_size = 1;
  int64_t replicate_size = 1;
  std::optional<double> factor = std::nullopt; // the user's divisor, instead of the number of ranks
  bool force_sum = false;                      // no other collectives than sums
};

/// How the division is spread over a reduction. A factor that is absent is not
/// worth a kernel.
struct DivideFactors {
  std::optional<double> pre;  // of the reduce-scatter input
  std::optional<double> post; // of the result
  ReduceOp reduce_scatter_op;
  ReduceOp all_reduce_op;
};

/// fp32 and bf16 are divided by the collective itself. fp16 may overflow in
/// the sum and underflow in the quotient, so it is divided in two steps of
/// about the same size, the first a power of two.
DivideFactors divide_factors(const DivideRequest& request);

} // namespace fsdp::detail
