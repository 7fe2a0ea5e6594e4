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

/// torch's cross_entropy of logits whose classes are divided over a mesh of one
/// axis, as ColwiseParallel leaves them: no rank ever holds a whole row. Upstream
/// has it as loss_parallel. `local_logits` are (classes), (N, classes) or (N,
/// classes, ...) with this rank's chunk of the classes, in half or bfloat16 too;
/// `targets` are class numbers, the same on every rank. So is the loss, and its
/// gradient is that of the local logits. Collective: two all-reduces, of one and
/// three numbers per row; none in backward.
FSDP_API at::Tensor parallel_cross_entropy(
    const at::Tensor& local_logits,
    const at::Tensor& targets,
    const DeviceMesh& mesh,
    const ParallelCrossEntropyOptions& options = {});

} // namespace fsdp
