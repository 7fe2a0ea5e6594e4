#include "collective/gather.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <numeric>
#include <utility>

namespace fsdp::detail {

GatherLayout::GatherLayout(std::vector<int64_t> numels)
    : part_numels(std::move(numels)),
      shard_numel(std::accumulate(part_numels.begin(), part_numels.end(), int64_t{0})) {}

Gathered start_gather(const at::Tensor& shard, const ProcessGroup& group) {
  Gathered gathered;
  gathered.buffer = at::empty({shard.numel() * group.size()}, shard.options());
  gathered.work = group.all_gather_async(gathered.buffer, shard);
  return gathered;
}

void copy_out(
    const Gathered& gathered, const GatherLayout& layout, const std::vector<at::Tensor>& targets) {
  // Below autograd and its version counters: what was saved for backward stays
  // valid, since it is the same value that comes back.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::split_with_sizes_copy_out(
      targets, gathered.buffer.view({-1, layout.shard_numel}), layout.part_numels, /*dim=*/1);
}

} // namespace fsdp::detail
