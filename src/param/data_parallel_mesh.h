#pragma once

#include <fsdp/device_mesh.h>
#include <fsdp/policy.h>

#include <optional>

namespace fsdp::detail {

/// The ranks over which parameters are sharded and replicated: the axes of data parallelism, and
/// the mesh that they were taken from, if one was given.
struct DataParallelMesh {
  /// For fully_shard. A mesh of one axis shards. A mesh of two axes replicates over the first one
  /// and shards over the second one (HSDP). With `dims`, the mesh may be larger, and `dims` names
  /// its axes. Several axes of one kind are merged into one, which is collective over the world.
  explicit DataParallelMesh(
      const DeviceMesh& mesh, const std::optional<DataParallelMeshDims>& dims = {});
  /// For replicate: one axis of ranks, each holding whole parameters.
  static DataParallelMesh replicated(
      const DeviceMesh& mesh, const std::optional<DataParallelMeshDims>& dims = {});

  /// The same ranks, each holding whole parameters. Collective over the world if there are two axes
  /// or `dims` names several.
  DataParallelMesh all_replicated() const;

  /// The shard axis as a mesh of one axis. Empty if nothing is sharded.
  std::optional<DeviceMesh> shard_mesh() const;

  DeviceMesh mesh; // of one or two axes
  std::optional<int64_t> shard_axis;
  ProcessGroup shard_group;                    // this rank alone if nothing is sharded
  std::optional<ProcessGroup> replicate_group; // empty if there is one replica only

  /// The arguments of the constructor, if it was given `dims`.
  struct ParentMesh {
    DeviceMesh mesh;
    DataParallelMeshDims dims;
  };
  std::optional<ParentMesh> parent;

 private:
  DataParallelMesh(const DeviceMesh& mesh, bool replicated);
};

} // namespace fsdp::detail
