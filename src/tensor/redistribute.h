#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/placement.h>

namespace fsdp::detail {

/// How a tensor of `sizes` lies on a mesh.
struct TensorSpec {
  DeviceMesh mesh;
  std::vector<Placement> placements; // normalized
  std::vector<int64_t> sizes;
};

/// The local tensor after moving from `spec` to `target`. Collective over the
/// mesh's axes that change. Gathers no more than it must: an axis that only
/// changes from sum to shard is one reduce-scatter, from one shard dim to
/// another one all-to-all.
at::Tensor redistribute(
    at::Tensor local, const TensorSpec& spec, const std::vector<Placement>& target);

/// This rank's part of `full`, whose values are taken from the mesh's first
/// rank. Collective.
at::Tensor distribute(const at::Tensor& full, const TensorSpec& target);

} // namespace fsdp::detail
