#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "param/data_parallel_mesh.h"
#include "param/spread.h"

namespace fsdp::detail {

// Where a parameter lies at rest, whoever placed it: fully_shard,
// parallelize_module, or one after the other. Its gradient lies there, too.

/// How a tensor of `sizes` lies whose pieces (of `spread`, or else it is whole)
/// data parallelism divides along `dim`. Throws ValueError where the two meshes do
/// not go together.
TensorSpec placed_over(
    const DataParallelMesh& mesh,
    int64_t dim,
    const std::vector<int64_t>& sizes,
    const Spread* spread);

/// None of a tensor that nobody placed.
std::optional<TensorSpec> placement_of(const at::Tensor& param);

/// Ranks among whom a parameter is divided, or that have the same of it.
struct ParamAxis {
  ProcessGroup group;
  at::Device device; // where it communicates
  bool divides;
};
/// Those of more than one rank; none of a tensor that nobody placed.
std::vector<ParamAxis> axes_of(const at::Tensor& param);

/// As whoever placed it knows it, or "".
std::string name_of(const at::Tensor& param);

} // namespace fsdp::detail
