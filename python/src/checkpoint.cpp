#include "checkpoint.h"

#include <fsdp/checkpoint.h>
#include <fsdp/dtensor.h>

#include <future>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mesh_spec.h"

namespace fsdp::python {

namespace {

using Items = std::vector<StateDict::Item>;

StateDict state_of(Items items) {
  StateDict state;
  for (auto& [key, value] : items) {
    state.insert(std::move(key), std::move(value));
  }
  return state;
}

/// No number: replicated. One: the dim of a shard. Two: the dim and the split factor of a strided
/// shard.
Placement placement_of(const std::vector<int64_t>& numbers) {
  if (numbers.empty()) {
    return Replicate{};
  }
  return numbers.size() == 1 ? Placement(Shard{numbers[0]})
                             : Placement(StridedShard{numbers[0], numbers[1]});
}

DTensor dtensor_of(
    at::Tensor local,
    const DeviceMesh& mesh,
    const std::vector<std::vector<int64_t>>& placements,
    std::vector<int64_t> sizes) {
  std::vector<Placement> all;
  for (const auto& numbers : placements) {
    all.push_back(placement_of(numbers));
  }
  return DTensor::from_local(std::move(local), mesh, std::move(all), std::move(sizes));
}

/// Fills the tensors. Returns the other values.
Items load_into(Items items, const std::string& path, bool strict, bool verify) {
  auto state = state_of(std::move(items));
  load(state, path, {.strict = strict, .verify = verify});
  Items values;
  for (const auto& item : state) {
    if (!std::holds_alternative<at::Tensor>(item.second) &&
        !std::holds_alternative<DTensor>(item.second)) {
      values.push_back(item);
    }
  }
  return values;
}

} // namespace

void bind_checkpoints(py::module_& m) {
  using Unlocking = py::call_guard<py::gil_scoped_release>;
  py::class_<DeviceMesh>(m, "Mesh").def(py::init(&mesh_of));
  py::class_<DTensor>(m, "DTensor").def(py::init(&dtensor_of));
  py::class_<std::shared_future<void>>(m, "SaveUnderWay")
      .def("result", [](const std::shared_future<void>& future) { future.get(); }, Unlocking());
  m.def("enter_world", &enter_world);
  m.def("leave_world", &leave_world);
  m.def(
      "save",
      [](Items items, const std::string& path, bool overwrite) {
        save(state_of(std::move(items)), path, {.overwrite = overwrite});
      },
      Unlocking());
  m.def(
      "async_save",
      [](Items items, const std::string& path, bool overwrite) {
        return async_save(state_of(std::move(items)), path, {.overwrite = overwrite}).share();
      },
      Unlocking());
  m.def("load", &load_into, Unlocking());
}

} // namespace fsdp::python
