#include "cli/train/fit.h"

#include <torch/cuda.h>
#include <algorithm>

#include <fsdp/launch.h>

#include "cli/check.h"
#include "cli/config/presets.h"
#include "cli/train/progress.h"

namespace fsdp::cli {

namespace {

/// One kind of memory: what ranks need of it, and what is free.
struct Need {
  int64_t ranks = 0;
  int64_t per_rank = 0;
  FreeMemory free;

  bool fits() const {
    return per_rank <= free.bytes / ranks;
  }
  std::string text() const {
    return c10::str(
        plural(ranks, "rank"), ranks == 1 ? " needs about " : " need about ",
        binary_size(ranks * per_rank),
        ranks == 1 ? "" : c10::str(", ", binary_size(per_rank), " each"), "; ",
        binary_size(free.bytes), " are free ", free.limit);
  }
};

/// The need that is not met. If both are met, that of the device.
Need open_need(const Plan& plan, const std::string& device, const Room& room) {
  const bool on_cpu = device == "cpu";
  const Need of_host{room.ranks, on_cpu ? plan.peak_bytes : plan.host_bytes, room.host};
  const Need of_device{room.ranks_per_device, plan.peak_bytes, room.device};
  return on_cpu || (of_device.fits() && !of_host.fits()) ? of_host : of_device;
}

/// Names a single change with which the run fits. Changes that leave the result as it is are tried
/// first. Empty if none was found.
std::string find_change(
    const TrainConfig& config, const MeshShape& mesh, const PlanFor& what, const Room& room) {
  const auto fits = [&](const TrainConfig& changed, const MeshShape& on) {
    return open_need(make_plan(changed, on, what), changed.device, room).fits();
  };
  auto changed = config;
  changed.activation_checkpointing = true;
  for (const std::string keep : {"all", "none"}) {
    changed.keep_matmuls = keep;
    if (fits(changed, mesh)) {
      return std::string(config.activation_checkpointing ? "" : "--activation-checkpointing ") +
             "--keep-matmuls " + keep;
    }
  }
  changed = config;
  const auto rows = config.batch / mesh.data_ranks();
  for (auto parts = 2 * config.accumulate; parts <= rows && rows % parts == 0; parts *= 2) {
    changed.accumulate = parts;
    if (fits(changed, mesh)) {
      return c10::str("--accumulate ", parts);
    }
  }
  changed = config;
  changed.offload = true;
  changed.device_budget = "0";
  if (config.device != "cpu" && fits(changed, mesh)) {
    return config.offload ? "--device-budget 0" : "--offload";
  }
  changed = config;
  auto wider = mesh;
  for (int64_t machines = 2; machines <= 1024; machines *= 2) {
    wider.shard *= 2;
    changed.batch *= 2; // so that a rank has as many rows as before
    if (fits(changed, wider)) {
      return c10::str("--mesh ", wider.str(), " over ", machines, " machines like this one");
    }
  }
  for (auto preset = model_presets().rbegin(); preset != model_presets().rend(); ++preset) {
    changed = config;
    changed.model = preset->dims;
    if (fits(changed, mesh)) {
      return "--model " + preset->name;
    }
  }
  return "";
}

} // namespace

int64_t ranks_per_device(const std::string& device, int64_t ranks) {
  const auto accelerators = device == "cpu" ? 0 : static_cast<int64_t>(torch::cuda::device_count());
  const auto devices = std::max<int64_t>(accelerators, 1);
  return (ranks + devices - 1) / devices;
}

Room find_room(const std::string& device, int64_t ranks) {
  Room room{.host = free_host_memory(), .device = {}, .ranks = ranks};
  const auto devices = static_cast<int64_t>(torch::cuda::device_count());
  if (device != "cpu" && devices > 0) {
    room.ranks_per_device = ranks_per_device(device, ranks);
    // Each process looks at its own device: to look at another one takes memory there.
    const auto index = static_cast<c10::DeviceIndex>(local_rank().rank % devices);
    room.device = free_device_memory(c10::Device(c10::kCUDA, index));
  }
  return room;
}

Fit judge(const TrainConfig& config, const MeshShape& mesh, const PlanFor& what, const Room& room) {
  const auto need = open_need(make_plan(config, mesh, what), config.device, room);
  if (need.fits()) {
    return {true, need.text()};
  }
  const auto change = find_change(config, mesh, what, room);
  return {
      false, need.text() + "; " +
                 (change.empty() ? "no single change of options helps" : "it fits with " + change)};
}

void check_fit(const Fit& fit, bool force) {
  check_config(
      fit.fits || force, "the run is too large: ", fit.text, "; --force begins it all the same");
}

} // namespace fsdp::cli
