#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <fsdp/export.h>

namespace fsdp {

/// Scales the gradients of `params` so that their norm is at most `max_norm`, as
/// torch.nn.utils.clip_grad_norm_ does. The norm is that of all gradients as one vector, computed
/// from the unsharded gradients. Returns the norm before scaling, which is the same on every
/// rank. `norm_type` may be any p or infinity; with 0 the norm is the number of nonzero elements.
/// With `error_if_nonfinite`, throws NonFiniteError instead of scaling by a norm that is not
/// finite.
///
/// The parameters may be sharded or not. Gradients of parameters that are not sharded must have
/// been reduced before. Parameters without a gradient are ignored. Collective: every rank must
/// give the same parameters in the same order. Makes one all-reduce per process group that shards
/// some of them.
FSDP_API at::Tensor clip_grad_norm_(
    const std::vector<at::Tensor>& params,
    double max_norm,
    double norm_type = 2.0,
    bool error_if_nonfinite = false);

} // namespace fsdp
