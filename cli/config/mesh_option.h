#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <fsdp/device_mesh.h>

namespace fsdp::cli {

/// How ranks are arranged: replicas of groups that share the parameters, each rank
/// of which is a group of ranks that share the computation of a batch.
struct MeshShape {
  int64_t replicate = 1;
  int64_t shard = 1;
  int64_t tensor = 1;

  int64_t ranks() const {
    return replicate * shard * tensor;
  }
  /// Ranks that see different rows of a batch.
  int64_t data_ranks() const {
    return replicate * shard;
  }
  /// "shard=4", "dp=2,shard=2,tp=2": as --mesh takes it.
  std::string str() const;

  bool operator==(const MeshShape&) const = default;
};

/// Of "dp=2,shard=2,tp=2" (dp is also called replicate). An axis that is missing
/// is 1; but where the number of ranks is known, shard takes the rest of them.
/// Throws ConfigError that names --mesh and the way out.
MeshShape parse_mesh(const std::string& text, std::optional<int64_t> ranks);

/// The slices of a mesh that fully_shard and tensor parallelism take. Collective
/// over the world, which has as many ranks.
struct TrainMesh {
  TrainMesh(const MeshShape& shape, c10::DeviceType device);

  MeshShape shape;
  DeviceMesh data;                  // one axis of shards, or two with replicas
  std::optional<DeviceMesh> tensor; // none where it would have one rank
  int64_t data_rank = 0;            // which part of a batch is ours
};

} // namespace fsdp::cli
