#include "process_group/gather_plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "process_group/c10d_adapter.h"

namespace fsdp::detail {

void place(const at::Tensor& out, const std::vector<const void*>& inputs, const GatherPlan& plan) {
  const auto size = static_cast<int64_t>(out.element_size());
  for (const auto& part : plan.parts) {
    auto* run = static_cast<char*>(out.data_ptr()) + part.out * size;
    auto input = inputs.begin(); // of the first ranks: the others may have none of it
    for (int64_t done = 0; done < part.whole; done += part.numel) {
      std::memcpy(
          run + done * size, static_cast<const char*>(*input++) + part.in * size,
          std::min(part.numel, part.whole - done) * size);
    }
  }
}

void place_repeated(const at::Tensor& out, const at::Tensor& in, const GatherPlan& plan) {
  const auto size = static_cast<int64_t>(in.element_size());
  for (const auto& part : plan.parts) {
    auto* run = static_cast<char*>(out.data_ptr()) + part.out * size;
    const auto* from = static_cast<const char*>(in.const_data_ptr()) + part.in * size;
    std::memcpy(run, from, std::min(part.numel, part.whole) * size);
    // Twice as much each time: few copies however many ranks.
    for (int64_t done = part.numel; 0 < done && done < part.whole; done *= 2) {
      std::memcpy(run + done * size, run, std::min(done, part.whole - done) * size);
    }
  }
}

bool places_gathers(const ProcessGroup& group, c10::Device device) {
  return device.is_cpu() && dynamic_cast<const LocalBackend*>(group.backend().get()) != nullptr;
}

Work all_gather_placed_async(
    const ProcessGroup& group,
    at::Tensor out,
    at::Tensor in,
    std::shared_ptr<const GatherPlan> plan) {
  return group.issue(
      {.kind = CollectiveKind::AllGather,
       .output = std::move(out),
       .input = std::move(in),
       .plan = std::move(plan)});
}

} // namespace fsdp::detail
