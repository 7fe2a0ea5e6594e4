#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace fsdp::detail {

/// Calls `body(rank)` for every rank, by several threads where each has enough
/// to copy: `numel` elements for a rank.
template <class Body>
void over_ranks(int64_t num_ranks, int64_t numel, const Body& body) {
  constexpr int64_t kGrainSize = 32768; // from where torch's own operators use threads
  const auto grain = kGrainSize / std::max<int64_t>(numel, 1) + 1;
  at::parallel_for(0, num_ranks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t rank = begin; rank < end; ++rank) {
      body(rank);
    }
  });
}

} // namespace fsdp::detail
