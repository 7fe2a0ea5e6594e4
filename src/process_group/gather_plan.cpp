#include "process_group/gather_plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "process_group/c10d_adapter.h"

namespace fsdp::detail {

namespace {

/// Calls `copy(to, from, bytes)` for the first rank's place of every part.
template <class Copy>
void for_each_part(
    const at::Tensor& out, const at::Tensor& in, const GatherPlan& plan, const Copy& copy) {
  const auto size = static_cast<int64_t>(in.element_size());
  auto* to = static_cast<char*>(out.data_ptr());
  const auto* from = static_cast<const char*>(in.const_data_ptr());
  for (const auto& part : plan.parts) {
    if (part.numel > 0) {
      copy(to + part.out * size, from + part.in * size, part.numel * size);
    }
  }
}

} // namespace

void place(const at::Tensor& out, const at::Tensor& in, const GatherPlan& plan, int64_t rank) {
  for_each_part(out, in, plan, [&](char* to, const char* from, int64_t bytes) {
    std::memcpy(to + rank * bytes, from, bytes);
  });
}

void place_repeated(const at::Tensor& out, const at::Tensor& in, const GatherPlan& plan) {
  for_each_part(out, in, plan, [&](char* to, const char* from, int64_t bytes) {
    std::memcpy(to, from, bytes);
    // Twice as much each time: few copies however many ranks.
    for (int64_t done = 1; done < plan.ranks; done *= 2) {
      std::memcpy(to + done * bytes, to, std::min(done, plan.ranks - done) * bytes);
    }
  });
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
