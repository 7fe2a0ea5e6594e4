#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <fsdp/process_group.h>

namespace fsdp::detail {

// Note [Flat layout of a group]
//
// Every rank's padded shards lie one behind the other in one flat buffer: the
// all-gather input, without any copy. The gathered buffer holds those of all
// ranks, rank after rank; copy-out makes of each parameter's pieces one
// contiguous run, where padding can only come last. So an unsharded parameter
// is a plain view of the beginning of its run. Reduction goes the other way.

/// Lengths of a group's parts per rank, in elements, computed once.
struct GatherLayout {
  std::vector<int64_t> part_numels;
  int64_t shard_numel = 0; // of all parts of one rank

  explicit GatherLayout(std::vector<int64_t> numels);
};

/// An all-gather under way. `buffer` must live until copy-out has been
/// enqueued.
struct Gathered {
  at::Tensor buffer; // 1D: ranks x shard_numel
  Work work;
};

/// Gathers every rank's flat `shard` into a new buffer.
Gathered start_gather(const at::Tensor& shard, const ProcessGroup& group);

/// Copies part i of the gathered buffer into `targets[i]`, which has shape
/// (ranks, part_numels[i]). Moves no version counter.
void copy_out(
    const Gathered& gathered, const GatherLayout& layout, const std::vector<at::Tensor>& targets);

} // namespace fsdp::detail
