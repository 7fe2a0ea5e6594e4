#include "collective/gather.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "collective/comm.h"
#include "collective/copy_pieces.h"

namespace fsdp::detail {

void PendingGather::wait(const OptionalStream& current) {
  issued.block(current);
  work.wait();
}

PendingGather start_gather(
    AllGather& comm,
    at::Tensor input,
    ProcessGroup group,
    const GatherStreams& streams,
    at::Tensor buffer) {
  PendingGather gathered;
  gathered.buffer = std::move(buffer);
  if (!gathered.buffer.defined()) {
    const c10::OptionalStreamGuard on(streams.copy_in);
    gathered.buffer = comm.allocate({input.numel() * group.size()}, input.options());
  }
  const auto check = [&, numel = input.numel() * group.size(), dtype = input.scalar_type()] {
    check_flat(gathered.buffer, numel, dtype, "the all-gather");
  };
  check();
  gathered.input = std::move(input);
  wait_for_stream(streams.all_gather, streams.copy_in);
  const c10::OptionalStreamGuard on(streams.all_gather);
  gathered.work = comm(gathered.buffer, gathered.input, group, /*async_op=*/true);
  check();
  gathered.issued = StreamEvent::of(streams.all_gather);
  return gathered;
}

PendingGather start_placed_gather(
    at::Tensor input,
    const ProcessGroup& group,
    std::shared_ptr<const GatherPlan> plan,
    const GatherStreams& streams,
    at::Tensor buffer) {
  PendingGather gathered;
  gathered.placed = true;
  gathered.stream = streams.all_gather;
  gathered.input = std::move(input);
  wait_for_stream(streams.all_gather, streams.copy_in);
  const c10::OptionalStreamGuard on(streams.all_gather);
  gathered.buffer =
      buffer.defined() ? std::move(buffer) : at::empty({plan->out_numel}, gathered.input.options());
  gathered.work = all_gather_placed_async(group, gathered.buffer, gathered.input, std::move(plan));
  gathered.issued = StreamEvent::of(streams.all_gather);
  return gathered;
}

void copy_out(const at::Tensor& buffer, const GatherPlan& plan, const at::Tensor& whole) {
  TORCH_INTERNAL_ASSERT(
      buffer.numel() == plan.ranks * plan.in_numel && whole.numel() == plan.out_numel);
  const auto size = static_cast<int64_t>(buffer.element_size());
  for (const auto& part : plan.parts) {
    copy_pieces(
        {.to = static_cast<char*>(whole.data_ptr()) + part.out * size,
         .to_step = part.numel * size,
         .from = static_cast<const char*>(buffer.const_data_ptr()) + part.in * size,
         .from_step = plan.in_numel * size,
         .size = part.numel * size,
         .bytes = part.unpadded_numel * size});
  }
}

void copy_out(
    const at::Tensor& buffer,
    const std::vector<int64_t>& numels,
    int64_t total_numel,
    const std::vector<at::Tensor>& targets) {
  // Runs below autograd, which would change version counters. Tensors saved for backward stay
  // valid, because a gather brings back the same values.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::split_with_sizes_copy_out(targets, buffer.view({-1, total_numel}), numels, /*dim=*/1);
}

} // namespace fsdp::detail
