#pragma once

#include <fsdp/device_mesh.h>
#include <fsdp/placement.h>

#include <optional>
#include <vector>

namespace fsdp::detail {

/// Over whom a parameter is divided, and who has the same part.
struct DataParallelMesh {
  /// One axis: of shards. Two: of replicas, then of shards (HSDP).
  DataParallelMesh(const DeviceMesh& mesh); // NOLINT: what a mesh means
  /// One axis, of replicas that have all of it.
  static DataParallelMesh replicated(const DeviceMesh& mesh);

  /// One per axis, for a parameter that is divided along `dim`.
  std::vector<Placement> placements(int64_t dim) const;
  /// Of the shards, as a mesh of one axis; none where nothing is divided.
  std::optional<DeviceMesh> shard_mesh() const;
  int64_t size() const {
    return mesh.size();
  }

  DeviceMesh mesh;
  ProcessGroup shard_group;                    // of one rank where nothing is divided
  std::optional<ProcessGroup> replicate_group; // where there is more than one replica

 private:
  DataParallelMesh(const DeviceMesh& mesh, bool replicated);
  std::optional<int64_t> shard_axis_;
};

} // namespace fsdp::detail
