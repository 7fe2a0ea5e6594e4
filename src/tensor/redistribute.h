#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/placement.h>

namespace fsdp::detail {

/// Says how a tensor of `sizes` is placed on a mesh.
struct TensorSpec {
  DeviceMesh mesh;
  std::vector<Placement> placements; // normalized
  std::vector<int64_t> sizes;
};

/// Moves the local tensor from `spec` to `target` and returns it. Collective over the mesh axes
/// that change. Avoids gathers: an axis that changes from a partial sum to a shard takes one
/// reduce-scatter, and an axis that changes its shard dim takes one all-to-all.
at::Tensor redistribute(
    at::Tensor local, const TensorSpec& spec, const std::vector<Placement>& target);

/// Returns this rank's part of `full`. The values come from the mesh's first rank. Collective.
at::Tensor distribute(const at::Tensor& full, const TensorSpec& target);

} // namespace fsdp::detail
