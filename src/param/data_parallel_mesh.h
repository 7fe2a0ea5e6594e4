#pragma once

#include <fsdp/device_mesh.h>
#include <fsdp/policy.h>

#include <optional>

namespace fsdp::detail {

/// Over whom a parameter is divided, and who has the same part: the axes of data
/// parallelism, and the mesh that they are axes of where that was given.
struct DataParallelMesh {
  /// Of fully_shard. One axis: of shards. Two: of replicas, then of shards (HSDP).
  /// With `dims`, those say which axes of a mesh are what; several of a kind count
  /// as one, which makes this collective over the world.
  explicit DataParallelMesh(
      const DeviceMesh& mesh, const std::optional<DataParallelMeshDims>& dims = {});
  /// Of replicate: one axis, of ranks that have all of it.
  static DataParallelMesh replicated(
      const DeviceMesh& mesh, const std::optional<DataParallelMeshDims>& dims = {});

  /// The same ranks, all of which have all of it. With two axes, or `dims` of several,
  /// collective over the world.
  DataParallelMesh undivided() const;

  /// Of the shards, as a mesh of one axis; none where nothing is divided.
  std::optional<DeviceMesh> shard_mesh() const;

  DeviceMesh mesh; // of one or two axes
  std::optional<int64_t> shard_axis;
  ProcessGroup shard_group;                    // of one rank where nothing is divided
  std::optional<ProcessGroup> replicate_group; // where there is more than one replica

  /// What `dims` named axes of.
  struct Whole {
    DeviceMesh mesh;
    DataParallelMeshDims dims;
  };
  std::optional<Whole> whole;

 private:
  DataParallelMesh(const DeviceMesh& mesh, bool replicated);
};

} // namespace fsdp::detail
