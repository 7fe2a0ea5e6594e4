#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "param/data_parallel_mesh.h"
#include "param/tensor_piece.h"

namespace fsdp::detail {

// How a parameter is placed between iterations, by fully_shard, by parallelize_module, or by both.
// Its gradient is placed the same way.

/// Returns the placement of a parameter that data parallelism divides by `shard`. `sizes` are those
/// of the whole tensor. If `piece` is not null, data parallelism shards the pieces.
/// Throws ValueError if the two meshes do not go together.
TensorSpec data_parallel_placement(
    const DataParallelMesh& mesh,
    const Placement& shard,
    const std::vector<int64_t>& sizes,
    const TensorPiece* piece);

/// Returns nothing for a tensor that was never placed.
std::optional<TensorSpec> placement_of(const at::Tensor& param);

/// A group of ranks over which a parameter is divided, or which all hold the same part of it.
struct ParamAxis {
  ProcessGroup group;
  at::Device device; // that the group communicates on
  bool divides = false;
};
/// Returns the axes of more than one rank. Empty for a tensor that was never placed.
std::vector<ParamAxis> axes_of(const at::Tensor& param);

/// The name by which fully_shard or parallelize_module knows the parameter, or "".
std::string name_of(const at::Tensor& param);

} // namespace fsdp::detail
