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

/// A tensor that is distributed over a mesh: this rank's local part, and how the parts form the
/// whole tensor. A value type: copies share the local tensor. Functions that communicate are
/// collective over the mesh, and autograd does not record them.
class FSDP_API DTensor {
 public:
  /// This rank's part, exactly as it was given. It need not be contiguous.
  const at::Tensor& to_local() const& {
    return local_;
  }
  at::Tensor to_local() && { // for a temporary such as as_dtensor(param)
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
  /// The sizes of the whole tensor.
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

  /// Returns the whole tensor, on every rank.
  at::Tensor full_tensor() const;

  /// Returns the same tensor with other placements. If these are the placements it has, the
  /// result shares the local tensor.
  DTensor redistribute(std::vector<Placement> placements) const;

  /// Wraps a local tensor. Without `sizes`, all ranks are assumed to have parts of the same size.
  /// `sizes` are those of the whole tensor: throws ValueError if `local` does not have the sizes of
  /// this rank's part. Not collective.
  static DTensor from_local(
      at::Tensor local,
      const DeviceMesh& mesh,
      std::vector<Placement> placements,
      std::optional<std::vector<int64_t>> sizes = std::nullopt);

  /// "DTensor(Float[8, 4], (S(0)) on DeviceMesh(cpu, dp=2))"
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

/// Distributes `tensor` over the mesh. The values are those of the mesh's first rank; the tensors
/// of the other ranks must have the same sizes and dtype. Collective over the mesh.
FSDP_API DTensor distribute_tensor(
    const at::Tensor& tensor, const DeviceMesh& mesh, std::vector<Placement> placements);

} // namespace fsdp
