#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/state_dict.h>

namespace fsdp::detail {

// What only rank 0 has, for all ranks of the world.

/// True where there is no world.
bool is_rank_0();

/// Rank 0's tensor; the others bring one of the same sizes and dtype. Collective.
at::Tensor from_rank_0(const at::Tensor& tensor);
/// Rank 0's state dict with its tensors on meta. Collective; throws on every rank
/// where rank 0 has what cannot be sent.
StateDict description_from_rank_0(const char* function, const StateDict& state);

} // namespace fsdp::detail
