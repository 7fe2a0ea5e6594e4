#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <fsdp/export.h>

namespace fsdp {

/// Scales the gradients of `params`, sharded or not, so that their norm as one
/// vector is at most `max_norm`, and returns the norm from before: that of the
/// unsharded gradients, the same on every rank. `norm_type` may be any p and
/// infinity; 0 counts what is not zero. One all-reduce per process group that
/// shards some of them. Collective: every rank gives the same parameters in the
/// same order; one without a gradient does not count. Parameters that are not
/// sharded count as they are here: reduce their gradients first.
FSDP_API at::Tensor clip_grad_norm_(
    const std::vector<at::Tensor>& params,
    double max_norm,
    double norm_type = 2.0,
    bool error_if_nonfinite = false);

} // namespace fsdp
