#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/export.h>
#include <fsdp/placement.h>

namespace fsdp {

/// One tensor spread over a mesh: this rank's local part, and how the parts
/// make the whole. A value that shares its local tensor. What communicates is
/// collective over the mesh, and is not recorded by autograd.
class FSDP_API DTensor {
 public:
  /// This rank's part, contiguous or not, as it was given.
  const at::Tensor& to_local() const& {
    return local_;
  }
  at::Tensor to_local() && { // of as_dtensor(param), which is gone at once
    return std::move(local_);
  }
  const DeviceMesh& device_mesh() const {
    return mesh_;
  }
  /// One per mesh axis.
  const std::vector<Placement>& placements() const& {
    return placements_;
  }
  std::vector<Placement> placements() && {
    return std::move(placements_);
  }
  /// Of the whole tensor.
  at::IntArrayRef sizes() const& {
    return sizes_;
  }
  std::vector<int64_t> sizes() && {
    return std::move(sizes_);
  }
  at::ScalarType scalar_type() const {
    return local_.scalar_type();
  }
  int64_t dim() const {
    return static_cast<int64_t>(sizes_.size());
  }
  int64_t numel() const;

  /// The whole tensor on every rank.
  at::Tensor full_tensor() const;

  /// The same value, placed in another way; shares the local tensor where
  /// nothing has to change.
  DTensor redistribute(std::vector<Placement> placements) const;

  /// Wraps a local tensor. Without `sizes` the parts are taken to be even;
  /// with them the local part must be exactly this rank's. Not collective.
  static DTensor from_local(
      at::Tensor local,
      const DeviceMesh& mesh,
      std::vector<Placement> placements,
      std::optional<std::vector<int64_t>> sizes = std::nullopt);

  std::string str() const;

 private:
  DTensor(
      at::Tensor local,
      DeviceMesh mesh,
      std::vector<Placement> placements,
      std::vector<int64_t> sizes);
  friend DTensor distribute_tensor(
      const at::Tensor& tensor, const DeviceMesh& mesh, std::vector<Placement> placements);

  at::Tensor local_;
  DeviceMesh mesh_;
  std::vector<Placement> placements_;
  std::vector<int64_t> sizes_;
};

/// Spreads `tensor` over the mesh. The values are those of the mesh's first
/// rank; the others bring tensors of the same sizes and dtype. Collective.
FSDP_API DTensor distribute_tensor(
    const at::Tensor& tensor, const DeviceMesh& mesh, std::vector<Placement> placements);

} // namespace fsdp
