#include "process_group/gather_plan.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <fsdp/distributed.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "launch/launch_env.h"
#include "process_group/c10d_adapter.h"

namespace fsdp::detail {

namespace {

PlaceGathers place_gathers_from_env() {
  const auto asked = process_env("FSDP_PLACED_GATHERS").value_or("auto");
  FSDP_CHECK_AS(
      ConfigError, asked == "auto" || asked == "always" || asked == "never",
      "FSDP_PLACED_GATHERS is '", asked, "', not one of auto, always, never");
  return asked == "always"  ? PlaceGathers::Always
         : asked == "never" ? PlaceGathers::Never
                            : PlaceGathers::WhereWorthIt;
}

/// Returns true if each part is aligned so that NCCL can move many bytes at a
/// time. Offsets in the whole buffer always are: see flat_layout.
bool is_aligned(const GatherPlan& plan, int64_t element_size) {
  constexpr int64_t kAlignment = 16;
  return std::all_of(plan.parts.begin(), plan.parts.end(), [&](const auto& part) {
    return part.in * element_size % kAlignment == 0 &&
           part.numel * element_size % kAlignment == 0 && part.out * element_size % kAlignment == 0;
  });
}

/// Returns true if the parts are so large on average that the copy-out, which
/// placing avoids, would take longer than launching the parts one by one.
bool has_large_parts(const GatherPlan& plan, int64_t element_size) {
  constexpr int64_t kWorthIt = 1 << 20; // bytes of a whole parameter
  const auto num_parts = static_cast<int64_t>(plan.parts.size());
  return plan.in_numel * plan.ranks * element_size >= kWorthIt * num_parts;
}

} // namespace

std::atomic<PlaceGathers>& place_gathers() {
  static std::atomic<PlaceGathers> asked = place_gathers_from_env();
  return asked;
}

void copy_parts(
    const at::Tensor& out, const std::vector<const void*>& inputs, const GatherPlan& plan) {
  const auto size = static_cast<int64_t>(out.element_size());
  for (const auto& part : plan.parts) {
    auto* run = static_cast<char*>(out.data_ptr()) + part.out * size;
    auto input = inputs.begin(); // the last ranks are not read if they have only padding
    for (int64_t done = 0; done < part.unpadded_numel; done += part.numel) {
      std::memcpy(
          run + done * size, static_cast<const char*>(*input++) + part.in * size,
          std::min(part.numel, part.unpadded_numel - done) * size);
    }
  }
}

void place_on_device(
    const at::Tensor& out, const at::Tensor& in, const GatherPlan& plan, int64_t rank) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& part : plan.parts) {
    const auto before = rank * part.numel;
    const auto numel = std::min(part.numel, part.unpadded_numel - before);
    if (numel > 0) {
      out.narrow(0, part.out + before, numel)
          .copy_(in.narrow(0, part.in, numel), /*non_blocking=*/true);
    }
  }
}

void place_repeated(const at::Tensor& out, const at::Tensor& in, const GatherPlan& plan) {
  const auto size = static_cast<int64_t>(in.element_size());
  for (const auto& part : plan.parts) {
    auto* run = static_cast<char*>(out.data_ptr()) + part.out * size;
    const auto* from = static_cast<const char*>(in.const_data_ptr()) + part.in * size;
    std::memcpy(run, from, std::min(part.numel, part.unpadded_numel) * size);
    // Each copy doubles what is filled, so there are few copies for any number of ranks.
    for (int64_t done = part.numel; 0 < done && done < part.unpadded_numel; done *= 2) {
      std::memcpy(run + done * size, run, std::min(done, part.unpadded_numel - done) * size);
    }
  }
}

bool places_gathers(
    const ProcessGroup& group, const GatherPlan& plan, const at::TensorOptions& options) {
  const auto& backend = *group.backend();
  const auto* local = dynamic_cast<const LocalBackend*>(&backend);
  const auto asked = place_gathers().load();
  if (asked == PlaceGathers::Never) {
    return false;
  }
  const auto device = options.device();
  if (!device.is_cuda() || plan.in_numel == 0) {
    return device.is_cpu() && local;
  }
  const auto element_size = static_cast<int64_t>(options.dtype().itemsize());
  const bool can = local || (backend.getBackendName() == "nccl" && is_aligned(plan, element_size));
  if (!can || asked == PlaceGathers::Always) {
    return can;
  }
  if (!local && nccl_shares_gpus()) {
    return false; // each parameter would wait for the turns of all ranks on the GPU
  }
  return (!local || local->places_on_devices()) && has_large_parts(plan, element_size);
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
