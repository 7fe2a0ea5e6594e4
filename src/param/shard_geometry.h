#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::detail {

/// How one parameter is divided over the ranks of a group, in numbers, as seen from one rank. Every
/// rank's shard is padded to the length of the longest.
struct ShardGeometry {
  std::vector<int64_t> sizes; // of the whole parameter
  int64_t dim = 0;
  int64_t num_ranks = 1;
  int64_t offset = 0;                // where this rank's shard begins along `dim`
  std::vector<int64_t> shard_sizes;  // of this rank
  std::vector<int64_t> padded_sizes; // of every rank
  int64_t padded_numel = 0;

  int64_t shard_numel() const;
  /// The sizes of the shard of any rank.
  std::vector<int64_t> shard_sizes_of(int64_t rank) const;
  /// Elements of the gathered, padded parameter.
  int64_t gathered_numel() const {
    return padded_numel * num_ranks;
  }
};

/// Divides as `torch::chunk` does. A negative dim counts from the end. Throws ValueError for a
/// scalar or an invalid dim.
ShardGeometry shard_geometry(
    const std::string& name,
    const std::vector<int64_t>& sizes,
    int64_t dim,
    int64_t num_ranks,
    int64_t rank);

} // namespace fsdp::detail
