#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::detail {

// Note [Unfilled tensors]
//
// Memory that to_empty allocated has no values until somebody writes them.
// Every byte of it is set to 255, which is a NaN in the usual floating point
// formats, and the tensor is remembered with its version. It is unfilled while
// neither has changed: writes through data() or a pointer leave the version
// alone, and -1 is a value that integers may well be filled with. Sharding gives
// a parameter another counter, so there the values alone tell.

/// Overwrites `tensor`, and remembers that it holds nothing yet.
void set_unfilled(const at::Tensor& tensor);
/// Whether nobody has written to it, or put something in its place, since. Of a
/// sharded parameter the shard counts; where that is empty, false.
bool is_unfilled(const at::Tensor& tensor);

} // namespace fsdp::detail
