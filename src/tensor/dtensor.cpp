#include <fsdp/dtensor.h>

#include <c10/util/Exception.h>

#include <functional>
#include <numeric>
#include <utility>

#include "layout/shard_layout.h"
#include "tensor/redistribute.h"

namespace fsdp {

namespace {

std::vector<int64_t> even_sizes(
    const at::Tensor& local, const DeviceMesh& mesh, const std::vector<Placement>& placements) {
  TORCH_CHECK_VALUE(
      !detail::block_step(placements, mesh.shape()), "[from_local] of ", to_string(placements),
      ": say the sizes of the whole tensor, too");
  auto sizes = local.sizes().vec();
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    const auto dim = detail::shard_dim(placements[axis]);
    if (dim >= 0) {
      sizes[dim] *= mesh.shape()[axis];
    }
  }
  return sizes;
}

} // namespace

DTensor::DTensor(
    at::Tensor local,
    DeviceMesh mesh,
    std::vector<Placement> placements,
    std::vector<int64_t> sizes)
    : local_(std::move(local)),
      mesh_(std::move(mesh)),
      placements_(std::move(placements)),
      sizes_(std::move(sizes)) {}

int64_t DTensor::numel() const {
  return std::accumulate(sizes_.begin(), sizes_.end(), int64_t{1}, std::multiplies<>());
}

at::Tensor DTensor::full_tensor() const {
  return redistribute(std::vector<Placement>(placements_.size(), Replicate{})).to_local();
}

DTensor DTensor::redistribute(std::vector<Placement> placements) const {
  placements = detail::normalized(std::move(placements), dim(), mesh_.ndim());
  auto local =
      placements == placements_
          ? local_
          : detail::redistribute(local_.detach(), {mesh_, placements_, sizes_}, placements);
  return {std::move(local), mesh_, std::move(placements), sizes_};
}

DTensor DTensor::from_local(
    at::Tensor local,
    const DeviceMesh& mesh,
    std::vector<Placement> placements,
    std::optional<std::vector<int64_t>> sizes) {
  TORCH_CHECK_VALUE(local.defined(), "[from_local] the local tensor is undefined");
  placements = detail::normalized(std::move(placements), local.dim(), mesh.ndim());
  if (!sizes) {
    auto even = even_sizes(local, mesh, placements);
    return {std::move(local), mesh, std::move(placements), std::move(even)};
  }
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(sizes->size()) == local.dim(), "[from_local] sizes ",
      c10::IntArrayRef(*sizes), " and the local tensor ", local.sizes(),
      " have different numbers of dims");
  const auto expected =
      detail::local_sizes(*sizes, placements, mesh.shape(), mesh.get_coordinate());
  TORCH_CHECK_VALUE(
      local.sizes() == c10::IntArrayRef(expected), "[from_local] of a tensor ",
      c10::IntArrayRef(*sizes), " placed ", to_string(placements), " on ", mesh.str(),
      ", the rank at ", c10::IntArrayRef(mesh.get_coordinate()), " holds ",
      c10::IntArrayRef(expected), ", but the local tensor is ", local.sizes());
  return {std::move(local), mesh, std::move(placements), std::move(*sizes)};
}

std::string DTensor::str() const {
  return c10::str(
      "DTensor(", scalar_type(), sizes(), ", ", to_string(placements_), " on ", mesh_.str(), ")");
}

DTensor distribute_tensor(
    const at::Tensor& tensor, const DeviceMesh& mesh, std::vector<Placement> placements) {
  TORCH_CHECK_VALUE(tensor.defined(), "[distribute_tensor] the tensor is undefined");
  placements = detail::normalized(std::move(placements), tensor.dim(), mesh.ndim());
  auto sizes = tensor.sizes().vec();
  auto local = detail::distribute(tensor, {mesh, placements, sizes});
  return {std::move(local), mesh, std::move(placements), std::move(sizes)};
}

} // namespace fsdp
