#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <fsdp/reduce_op.h>

namespace fsdp::detail {

/// Reduces `inputs`, in the order of the list, into `output`. All are 1D and of
/// one length. The order is fixed, so the result has the same bits every time.
/// 16-bit and 8-bit floats are accumulated in fp32 and rounded once. `output` may
/// be one of `inputs`.
void reduce_in_order(
    const at::Tensor& output, const std::vector<at::Tensor>& inputs, const ReduceOp& op);

/// Divides a sum by `count`, the last step of an average. Integers are rounded
/// towards zero.
void divide_sum(const at::Tensor& sum, int64_t count);

} // namespace fsdp::detail
