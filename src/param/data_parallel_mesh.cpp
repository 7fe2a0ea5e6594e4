#include "param/data_parallel_mesh.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/text.h"

namespace fsdp::detail {

namespace {

void check(const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(
      mesh.ndim() <= 2, "[fully_shard] expects a 1D or 2D DeviceMesh, but got ", mesh.str(),
      "; take a slice of it, or say in dp_mesh_dims which axes are of data parallelism");
  TORCH_CHECK_VALUE(
      mesh.ndim() == 1 || !mesh.names().empty(),
      "[fully_shard] please init the 2D mesh for HSDP with mesh_dim_names specified: ", mesh.str());
}

void check(const DeviceMesh& mesh, const DataParallelMeshDims& dims) {
  TORCH_CHECK_VALUE(
      !dims.shard.empty() || !dims.replicate.empty(),
      "[fully_shard] At least one of shard or replicate must be set in dp_mesh_dims");
  TORCH_CHECK_VALUE(
      !mesh.names().empty(),
      "[fully_shard] the mesh must have mesh_dim_names when dp_mesh_dims is given: ", mesh.str());
  std::vector<std::string> seen;
  for (const auto* names : {&dims.replicate, &dims.shard}) {
    for (const auto& name : *names) {
      const auto& known = mesh.names();
      TORCH_CHECK_VALUE(
          std::find(known.begin(), known.end(), name) != known.end(), "[fully_shard] the axis '",
          name, "' of dp_mesh_dims is not found in mesh.mesh_dim_names: ", mesh.str());
      TORCH_CHECK_VALUE(
          std::find(seen.begin(), seen.end(), name) == seen.end(),
          "[fully_shard] dp_mesh_dims names '", name, "' twice");
      seen.push_back(name);
    }
  }
}

/// Returns the named axes as one axis.
DeviceMesh merged(const DeviceMesh& mesh, const std::vector<std::string>& names) {
  return names.size() == 1 ? mesh[names.front()] : mesh[names].flatten();
}

DeviceMesh axes_of(const DeviceMesh& mesh, const DataParallelMeshDims& dims) {
  check(mesh, dims);
  if (dims.shard.empty() || dims.replicate.empty()) {
    return merged(mesh, dims.shard.empty() ? dims.replicate : dims.shard);
  }
  return concatenate(merged(mesh, dims.replicate), merged(mesh, dims.shard));
}

} // namespace

DataParallelMesh::DataParallelMesh(const DeviceMesh& given, bool replicated) : mesh(given) {
  const bool merges = replicated && mesh.ndim() > 1; // all axes become one axis of replicas
  const auto first = merges ? mesh.flatten().get_group() : mesh.get_group(0);
  if (replicated) {
    shard_group = first.new_group({first.rank()});
  } else {
    shard_axis = mesh.ndim() - 1;
    shard_group = mesh.get_group(*shard_axis);
  }
  if ((replicated || mesh.ndim() == 2) && first.size() > 1) {
    replicate_group = first;
  }
}

DataParallelMesh::DataParallelMesh(
    const DeviceMesh& given, const std::optional<DataParallelMeshDims>& dims)
    : DataParallelMesh(dims ? axes_of(given, *dims) : given, dims && dims->shard.empty()) {
  if (dims) {
    parent = {given, *dims};
  } else {
    check(given);
  }
}

DataParallelMesh DataParallelMesh::replicated(
    const DeviceMesh& mesh, const std::optional<DataParallelMeshDims>& dims) {
  if (dims) {
    TORCH_CHECK_VALUE(
        dims->shard.empty(), "[replicate] dp_mesh_dims names ", join(dims->shard),
        " to shard over; fully_shard does that");
    return DataParallelMesh(mesh, dims);
  }
  TORCH_CHECK_VALUE(
      mesh.ndim() == 1, "[replicate] expects a 1D DeviceMesh, but got ", mesh.str(),
      "; take a slice of it");
  return {mesh, true};
}

DataParallelMesh DataParallelMesh::all_replicated() const {
  if (!parent) {
    return {mesh, true};
  }
  DataParallelMeshDims dims;
  for (const auto& name : parent->mesh.names()) { // the result is in the mesh's order
    for (const auto* own : {&parent->dims.replicate, &parent->dims.shard}) {
      if (std::find(own->begin(), own->end(), name) != own->end()) {
        dims.replicate.push_back(name);
      }
    }
  }
  return DataParallelMesh(parent->mesh, dims);
}

std::optional<DeviceMesh> DataParallelMesh::shard_mesh() const {
  if (!shard_axis) {
    return std::nullopt;
  }
  return mesh.ndim() == 1 ? mesh : mesh[mesh.names()[*shard_axis]];
}

} // namespace fsdp::detail
