#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fsdp/placement.h>

namespace fsdp::detail {

/// How one parameter is divided over the ranks of a group, in numbers, as seen from one rank. Every
/// rank's shard is padded to the length of the longest.
struct ShardGeometry {
  std::vector<int64_t> sizes; // of the whole parameter
  int64_t dim = 0;
  int64_t merged_dims = 1; // see BlockShard; if more, `dim` is 0
  int64_t num_ranks = 1;
  std::vector<int64_t> divided_sizes; // `sizes`, with the merged dims as one
  int64_t offset = 0;                 // where this rank's shard begins along `dim` of them
  int64_t length = 0;
  std::vector<int64_t> shard_sizes;  // of this rank
  std::vector<int64_t> padded_sizes; // of every rank
  int64_t padded_numel = 0;

  int64_t shard_numel() const;
  /// A Shard or a BlockShard.
  Placement placement() const;
  /// The sizes of the shard of any rank. No dims may be merged.
  std::vector<int64_t> shard_sizes_of(int64_t rank) const;
  /// Elements of the gathered, padded parameter.
  int64_t gathered_numel() const {
    return padded_numel * num_ranks;
  }
};

/// Divides as `torch::chunk` does: along `dim`, or along the rows that the first `merged_dims` dims
/// number. A negative dim counts from the end. Throws ValueError for a scalar or an invalid dim.
ShardGeometry shard_geometry(
    const std::string& name,
    const std::vector<int64_t>& sizes,
    int64_t dim,
    int64_t num_ranks,
    int64_t rank,
    int64_t merged_dims = 1);

} // namespace fsdp::detail
