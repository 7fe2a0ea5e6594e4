#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fsdp/export.h>

namespace fsdp {

/// The memory that a sharded module's parameters will take, and the bytes that a step sends. A step
/// is one forward and one backward that use every parameter and reduce all gradients. Bytes are
/// those of one rank. Frozen parameters may be gathered less often.
struct FSDP_API ShardingPlan {
  /// Parameters that are gathered and reduced together.
  struct Group {
    std::string module;     // name from the root; "" is the root, "a, b" two modules
    int64_t num_params = 0; // how many parameters, not their elements
    int64_t numel = 0; // elements of the whole parameters; of tensor parallelism, this rank's part
    int64_t shard_bytes = 0;    // while sharded, with padding
    bool on_host = false;       // shards, gradients and optimizer states are offloaded
    int64_t gathered_bytes = 0; // while gathered, in the dtype of compute, before alignment
    int64_t padding_bytes = 0;  // in `gathered_bytes`, so that all ranks have the same
    // How many collectives, and the bytes of all of them: of a rank's two buffers, the larger one.
    int64_t all_gathers = 0;
    int64_t all_gather_bytes = 0;
    int64_t reduce_scatters = 0;
    int64_t reduce_scatter_bytes = 0;
    int64_t all_reduces = 0;
    int64_t all_reduce_bytes = 0;
  };
  std::vector<Group> groups;

  Group total() const;
  /// A table, one line per group.
  std::string str() const;
};

} // namespace fsdp
