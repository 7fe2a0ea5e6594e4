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
  /// How the gradient of the result will lie. By default as the result does, or
  /// Replicate where that is Partial. Partial, for a result that is Replicate:
  /// each rank computes something else with it, and the gradients are summed.
  std::optional<Placement> grad_placement = {};
  /// Of the whole tensor. Without them a local tensor is one of even parts,
  /// unless tensors have been divided unevenly along that dim of that mesh:
  /// from then on the ranks tell each other their lengths.
  std::optional<std::vector<int64_t>> sizes = {};
};

/// Moves a tensor, of which `local` is this rank's part, from one placement to
/// another over a mesh of one axis: DTensor's redistribute for plain tensors,
/// and recorded by autograd. Collective, and so is its backward.
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
/// Parts are those of torch::chunk, so the last ranks may hold less, or nothing.
/// Partial is a sum. The result may share memory with `local`.
FSDP_API at::Tensor redistribute(
    const at::Tensor& local,
    const DeviceMesh& mesh,
    const Placement& from,
    const Placement& to,
    const RedistributeOptions& options = {});

} // namespace fsdp
