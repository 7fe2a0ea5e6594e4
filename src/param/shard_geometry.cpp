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

Placement ShardGeometry::placement() const {
  return merged_dims > 1 ? Placement(BlockShard{merged_dims}) : Shard{dim};
}

std::vector<int64_t> ShardGeometry::shard_sizes_of(int64_t rank) const {
  TORCH_INTERNAL_ASSERT(merged_dims == 1);
  auto of_rank = sizes;
  of_rank[dim] = chunk_run(sizes[dim], num_ranks, rank).length;
  return of_rank;
}

ShardGeometry shard_geometry(
    const std::string& name,
    const std::vector<int64_t>& sizes,
    int64_t dim,
    int64_t num_ranks,
    int64_t rank,
    int64_t merged_dims) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  TORCH_CHECK_VALUE(
      ndim > 0, "[fully_shard] does not support scalar parameters. Change ", name,
      " to a 1D tensor of one element");
  TORCH_CHECK_VALUE(
      dim >= -ndim && dim < ndim, "[fully_shard] Shard dim ", dim, " is invalid for ", ndim,
      "D tensor: parameter '", name, "' ", c10::IntArrayRef(sizes));
  dim = dim < 0 ? dim + ndim : dim;
  TORCH_CHECK_VALUE(
      merged_dims >= 1 && merged_dims <= ndim && (merged_dims == 1 || dim == 0),
      "[fully_shard] cannot merge ", merged_dims, " dims of parameter '", name, "' ",
      c10::IntArrayRef(sizes), " along dim ", dim, "; merge 2 to ", ndim,
      " dims, the first ones, along dim 0, or return Shard{0} for it");
  ShardGeometry geometry{
      .sizes = sizes, .dim = dim, .merged_dims = merged_dims, .num_ranks = num_ranks};
  const auto merged = merged_sizes(sizes, merged_dims);
  const auto shown_dim = static_cast<size_t>(dim + merged_dims - 1); // of `merged`
  const auto run = chunk_run(merged[shown_dim], num_ranks, rank);
  geometry.divided_sizes = {merged.begin() + merged_dims - 1, merged.end()};
  geometry.offset = run.offset;
  geometry.length = run.length;
  geometry.shard_sizes = merged;
  geometry.shard_sizes[shown_dim] = run.length;
  geometry.padded_sizes = merged;
  geometry.padded_sizes[shown_dim] = chunk_run(merged[shown_dim], num_ranks, 0).length;
  geometry.padded_numel = product(geometry.padded_sizes);
  return geometry;
}

} // namespace fsdp::detail
