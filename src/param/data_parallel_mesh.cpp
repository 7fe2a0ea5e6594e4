#include "param/data_parallel_mesh.h"

#include <c10/util/Exception.h>

#include <utility>

namespace fsdp::detail {

DataParallelMesh::DataParallelMesh(const DeviceMesh& mesh) : DataParallelMesh(mesh, false) {}

DataParallelMesh DataParallelMesh::replicated(const DeviceMesh& mesh) {
  return {mesh, true};
}

DataParallelMesh::DataParallelMesh(const DeviceMesh& given, bool replicated) : mesh(given) {
  TORCH_CHECK_VALUE(
      mesh.ndim() == 1 || (mesh.ndim() == 2 && !replicated),
      replicated ? "[replicate] expects a 1D DeviceMesh, but got "
                 : "[fully_shard] expects a 1D or 2D DeviceMesh, but got ",
      mesh.str(), "; take a slice of it");
  const auto first = mesh.get_group(0);
  if (replicated) {
    shard_group = first.new_group({first.rank()});
  } else {
    shard_axis_ = mesh.ndim() - 1;
    shard_group = mesh.get_group(*shard_axis_);
  }
  if ((replicated || mesh.ndim() == 2) && first.size() > 1) {
    replicate_group = first;
  }
}

std::vector<Placement> DataParallelMesh::placements(int64_t dim) const {
  std::vector<Placement> result(mesh.ndim(), Replicate{});
  if (shard_axis_) {
    result[*shard_axis_] = Shard{dim};
  }
  return result;
}

std::optional<DeviceMesh> DataParallelMesh::shard_mesh() const {
  if (!shard_axis_) {
    return std::nullopt;
  }
  return mesh.ndim() == 1 ? mesh : mesh[mesh.names()[*shard_axis_]];
}

} // namespace fsdp::detail
