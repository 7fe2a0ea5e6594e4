#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::detail {

// Note [Unfilled tensors]
//
// Memory that to_empty allocated has no values until somebody writes them. Every byte of it is set
// to 255, which makes a NaN in the usual floating point formats, and the tensor is remembered with
// its version. The tensor is unfilled as long as neither its values nor its version have changed.
// One of them is not enough: writes through data() or a pointer do not change the version, and
// integers may well be filled with -1. Sharding gives a parameter another version counter, so for a
// sharded parameter only the values count.

/// Overwrites `tensor` and remembers that it has no values yet.
void set_unfilled(const at::Tensor& tensor);
/// Returns true if nobody has written to `tensor` or replaced its content since set_unfilled. For a
/// sharded parameter the shard counts; an empty shard gives false.
bool is_unfilled(const at::Tensor& tensor);

} // namespace fsdp::detail
