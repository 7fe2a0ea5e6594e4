#include "param/shard_geometry.h"

#include <c10/util/Exception.h>

#include <functional>
#include <numeric>

#include "layout/shard_layout.h"

namespace fsdp::detail {

namespace {

int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

} // namespace

int64_t ShardGeometry::shard_numel() const {
  return product(shard_sizes);
}

std::vector<int64_t> ShardGeometry::shard_sizes_of(int64_t rank) const {
  auto of_rank = sizes;
  of_rank[dim] = chunk_run(sizes[dim], num_ranks, rank).length;
  return of_rank;
}

ShardGeometry shard_geometry(
    const std::string& name,
    const std::vector<int64_t>& sizes,
    int64_t dim,
    int64_t num_ranks,
    int64_t rank) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  TORCH_CHECK_VALUE(
      ndim > 0, "[fully_shard] does not support scalar parameters. Change ", name,
      " to a 1D tensor of one element");
  TORCH_CHECK_VALUE(
      dim >= -ndim && dim < ndim, "[fully_shard] Shard dim ", dim, " is invalid for ", ndim,
      "D tensor: parameter '", name, "' ", c10::IntArrayRef(sizes));
  dim = dim < 0 ? dim + ndim : dim;
  ShardGeometry geometry{.sizes = sizes, .dim = dim, .num_ranks = num_ranks};
  const auto run = chunk_run(sizes[dim], num_ranks, rank);
  geometry.offset = run.offset;
  geometry.shard_sizes = sizes;
  geometry.shard_sizes[dim] = run.length;
  geometry.padded_sizes = sizes;
  geometry.padded_sizes[dim] = chunk_run(sizes[dim], num_ranks, 0).length;
  geometry.padded_numel = product(geometry.padded_sizes);
  return geometry;
}

} // namespace fsdp::detail
