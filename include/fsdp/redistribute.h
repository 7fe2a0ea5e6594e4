#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/export.h>
#include <fsdp/placement.h>

namespace fsdp {

struct RedistributeOptions {
  /// The placement that the gradient of the result will have. By default that of the result, or
  /// Replicate if the result is Partial. If the result is Replicate, this may be Partial:
  /// use it if each rank computes something different with the result. Backward then sums the
  /// gradients over the ranks.
  std::optional<Placement> grad_placement = {};
  /// The sizes of the whole tensor. Without them, all ranks are assumed to have parts of the same
  /// size. But if the library has divided a tensor unevenly along the same dim of this mesh
  /// before, the ranks exchange their lengths first.
  std::optional<std::vector<int64_t>> sizes = {};
};

/// Moves a tensor from one placement to another over a mesh of one axis. `local` is this rank's
/// part of the tensor, and the result is its part afterwards. This is DTensor's redistribute for
/// plain tensors, and autograd records it. Collective, and so is its backward.
///
///   from       to         forward               backward
///   Partial    Replicate  all-reduce            -
///   Partial    Shard      reduce-scatter        all-gather
///   Replicate  Replicate  -                     -, or all-reduce *
///   Shard      Replicate  all-gather            slice, or reduce-scatter *
///   Replicate  Shard      slice                 all-gather
///   Shard      Shard      all-to-all            all-to-all
///   Replicate  Partial    kept by rank 0 only   -
///
///   * with grad_placement = Partial{}
///
/// Parts are the chunks of torch::chunk, so the last ranks may hold less than the others, or
/// nothing. Partial must be a sum. The result may share memory with `local`.
FSDP_API at::Tensor redistribute(
    const at::Tensor& local,
    const DeviceMesh& mesh,
    const Placement& from,
    const Placement& to,
    const RedistributeOptions& options = {});

} // namespace fsdp
