#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

#include <fsdp/device_mesh.h>
#include <fsdp/export.h>

namespace fsdp {

struct ParallelCrossEntropyOptions {
  int64_t ignore_index = -100;
  at::Reduction::Reduction reduction = at::Reduction::Mean;
  double label_smoothing = 0;
};

/// torch's cross_entropy for logits whose classes are divided over a mesh of one axis, as
/// ColwiseParallel leaves them; in Python this is loss_parallel. No rank ever holds a whole row.
/// `local_logits` has this rank's chunk of the classes, in the shape (classes), (N, classes) or
/// (N, classes, ...), and may be half or bfloat16. `targets` are class numbers and must be the
/// same on every rank. The loss is the same on every rank, and its gradient is that of the local
/// logits. Collective: forward makes two all-reduces, of one and three numbers per row (five with
/// label smoothing). Backward makes none.
FSDP_API at::Tensor parallel_cross_entropy(
    const at::Tensor& local_logits,
    const at::Tensor& targets,
    const DeviceMesh& mesh,
    const ParallelCrossEntropyOptions& options = {});

} // namespace fsdp
