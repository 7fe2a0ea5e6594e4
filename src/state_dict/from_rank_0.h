#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/state_dict.h>

namespace fsdp::detail {

// Sends data that only rank 0 has to all ranks of the world.

/// Returns true on rank 0, and without a process group.
bool is_rank_0();

/// Returns rank 0's tensor. The other ranks pass a tensor of the same sizes and dtype. Collective.
at::Tensor from_rank_0(const at::Tensor& tensor);
/// Returns rank 0's state dict with its tensors on meta. Throws ValueError on every rank if rank 0
/// has a value that cannot be sent. Collective.
StateDict description_from_rank_0(const char* function, const StateDict& state);

} // namespace fsdp::detail
