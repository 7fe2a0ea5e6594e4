#include <fsdp/random_state.h>

#include <ATen/ATen.h>
#include <fsdp/distributed.h>

#include <mutex>

#include "runtime/stream.h"

namespace fsdp {

namespace {

/// Returns the default generators, by the names of their devices.
std::vector<std::pair<std::string, at::Generator>> generators() {
  std::vector<std::pair<std::string, at::Generator>> found;
  const auto add = [&](c10::DeviceType type) {
    found.emplace_back(
        c10::DeviceTypeName(type, /*lower_case=*/true),
        at::globalContext().defaultGenerator(detail::current_device(type)));
  };
  add(at::kCPU);
  if (const auto type = detail::accelerator_type()) {
    add(*type);
  }
  return found;
}

} // namespace

StateDict get_random_state() {
  StateDict state;
  std::optional<DeviceMesh> world;
  if (is_initialized()) {
    world = init_device_mesh(at::kCPU, {get_world_size()});
  }
  for (auto& [name, generator] : generators()) {
    std::lock_guard lock(generator.mutex());
    const auto row = generator.get_state().unsqueeze(0);
    if (world) {
      state.insert(name, DTensor::from_local(row, *world, {Shard{0}}));
    } else {
      state.insert(name, row);
    }
  }
  return state;
}

void set_random_state(const StateDict& state) {
  for (auto& [name, generator] : generators()) {
    if (!state.contains(name)) {
      continue;
    }
    const auto& value = state.at(name);
    const auto* dtensor = std::get_if<DTensor>(&value);
    const auto* tensor = dtensor ? &dtensor->to_local() : std::get_if<at::Tensor>(&value);
    std::lock_guard lock(generator.mutex());
    TORCH_CHECK_VALUE(
        tensor && tensor->scalar_type() == at::kByte &&
            tensor->sizes() == at::IntArrayRef({1, generator.get_state().numel()}),
        "[set_random_state] '", name, "' is not the state of a generator of ",
        is_initialized() ? get_world_size() : 1,
        " ranks: a world of another size has to be seeded anew");
    generator.set_state((*tensor)[0].to(at::kCPU).clone());
  }
}

} // namespace fsdp
