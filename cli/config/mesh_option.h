#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <fsdp/device_mesh.h>

namespace fsdp::cli {

/// The sizes of the mesh's axes: there are `replicate` copies of the model, each is sharded over
/// `shard` ranks, and tensor parallelism divides each layer over `tensor` ranks.
struct MeshShape {
  int64_t replicate = 1;
  int64_t shard = 1;
  int64_t tensor = 1;

  int64_t ranks() const {
    return replicate * shard * tensor;
  }
  /// Into how many parts a batch is divided. The ranks of the tensor axis share a part.
  int64_t data_ranks() const {
    return replicate * shard;
  }
  /// The shape in the form that --mesh takes: "shard=4", "dp=2,shard=2,tp=2".
  std::string str() const;

  bool operator==(const MeshShape&) const = default;
};

/// Parses "dp=2,shard=2,tp=2"; "replicate" is another name of dp. A missing axis has size 1, but if
/// `ranks` is given, a missing shard axis gets all ranks that are left. Throws ConfigError with a
/// message that names --mesh and the remedy.
MeshShape parse_mesh(const std::string& text, std::optional<int64_t> ranks);

/// The mesh that comes nearest to `text` on other numbers of ranks: it keeps the tensor axis, and
/// the replicas if they still have equal sizes. Throws ConfigError if the tensor axis does not fit.
MeshShape fit_mesh(const std::string& text, int64_t ranks);

/// The parts of the mesh that fully_shard and tensor parallelism use. The constructor is collective
/// over the world, which must have `shape.ranks()` ranks.
struct TrainMesh {
  TrainMesh(const MeshShape& shape, c10::DeviceType device);

  MeshShape shape;
  DeviceMesh data;                  // the shard axis; with replicas also the replicate axis
  std::optional<DeviceMesh> tensor; // empty if the axis has one rank
  int64_t data_rank = 0;            // which part of a batch this rank gets
};

} // namespace fsdp::cli
