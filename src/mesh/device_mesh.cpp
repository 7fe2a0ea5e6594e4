#include <fsdp/device_mesh.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <utility>

#include <fsdp/distributed.h>

#include "base/text.h"
#include "layout/mesh_layout.h"

namespace fsdp {

namespace detail {

/// Shared by a mesh and all its slices.
struct MeshRoot {
  c10::DeviceType device_type = c10::kCPU;
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  std::vector<int64_t> coordinate;  // of this rank
  std::vector<int> ranks;           // the world rank at each position of the grid
  ProcessGroup world;               // empty for a mesh of given groups
  std::vector<ProcessGroup> groups; // given ones, one per axis, or none
  std::mutex mutex;
  std::map<std::string, std::vector<int64_t>> flattened; // name -> root axes
};

struct MeshState {
  std::shared_ptr<MeshRoot> root;
  std::vector<std::vector<int64_t>> axes; // the root axes of each axis
  std::vector<std::string> names;         // one per axis, or empty
  std::vector<int64_t> shape;
  std::vector<ProcessGroup> groups; // this rank's group of each axis
};

namespace {

/// Returns the world ranks that share this rank's coordinate on all axes but `axes`.
std::vector<int> ranks_along(const MeshRoot& root, const std::vector<int64_t>& axes) {
  auto ranks = axes_ranks(root.shape, root.coordinate, axes);
  for (auto& rank : ranks) {
    rank = root.ranks[rank];
  }
  return ranks;
}

ProcessGroup group_along(const MeshRoot& root, const std::vector<int64_t>& axes) {
  if (!root.groups.empty() && axes.size() == 1) {
    return root.groups[axes.front()];
  }
  // The same ranks give the same group, so meshes and slices share groups.
  return group_of_world_ranks(
      root.groups.empty() ? root.world : root.groups.front(), ranks_along(root, axes));
}

DeviceMesh make_mesh(
    std::shared_ptr<MeshRoot> root,
    std::vector<std::vector<int64_t>> axes,
    std::vector<std::string> names) {
  auto state = std::make_shared<MeshState>();
  for (const auto& axis : axes) {
    state->shape.push_back(axes_size(root->shape, axis));
    state->groups.push_back(group_along(*root, axis));
  }
  state->root = std::move(root);
  state->axes = std::move(axes);
  state->names = std::move(names);
  return DeviceMesh(std::move(state));
}

std::vector<int64_t> concatenated(const std::vector<std::vector<int64_t>>& axes) {
  std::vector<int64_t> all;
  for (const auto& axis : axes) {
    all.insert(all.end(), axis.begin(), axis.end());
  }
  return all;
}

void check_names(const char* function, const std::vector<std::string>& names, size_t num_axes) {
  TORCH_CHECK_VALUE(
      names.empty() || names.size() == num_axes, "[", function, "] ", names.size(), " names (",
      join(names), ") for ", num_axes, " axes");
  TORCH_CHECK_VALUE(
      std::set<std::string>(names.begin(), names.end()).size() == names.size(), "[", function,
      "] the axis names ", join(names), " are not all different");
}

/// Returns a mesh with all axes of the root.
DeviceMesh whole_mesh(std::shared_ptr<MeshRoot> root) {
  std::vector<std::vector<int64_t>> axes;
  for (size_t axis = 0; axis < root->shape.size(); ++axis) {
    axes.push_back({static_cast<int64_t>(axis)});
  }
  auto names = root->names;
  return make_mesh(std::move(root), std::move(axes), std::move(names));
}

} // namespace
} // namespace detail

DeviceMesh::DeviceMesh(std::shared_ptr<const detail::MeshState> state) : state_(std::move(state)) {}

c10::DeviceType DeviceMesh::device_type() const {
  return state_->root->device_type;
}

int64_t DeviceMesh::ndim() const {
  return static_cast<int64_t>(state_->axes.size());
}

const std::vector<int64_t>& DeviceMesh::shape() const {
  return state_->shape;
}

const std::vector<std::string>& DeviceMesh::names() const {
  return state_->names;
}

int64_t DeviceMesh::size() const {
  return std::accumulate(
      state_->shape.begin(), state_->shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t DeviceMesh::size(int64_t axis) const {
  check_axis(axis);
  return state_->shape[axis];
}

int64_t DeviceMesh::size(std::string_view axis) const {
  return size(axis_index(axis));
}

std::vector<int> DeviceMesh::ranks() const {
  return detail::ranks_along(*state_->root, detail::concatenated(state_->axes));
}

std::vector<int64_t> DeviceMesh::get_coordinate() const {
  std::vector<int64_t> coordinate;
  for (int64_t axis = 0; axis < ndim(); ++axis) {
    coordinate.push_back(get_local_rank(axis));
  }
  return coordinate;
}

int64_t DeviceMesh::get_local_rank(int64_t axis) const {
  check_axis(axis);
  const auto& root = *state_->root;
  return detail::axes_index(root.shape, root.coordinate, state_->axes[axis]);
}

int64_t DeviceMesh::get_local_rank(std::string_view axis) const {
  return get_local_rank(axis_index(axis));
}

int64_t DeviceMesh::get_local_rank() const {
  return get_group().rank();
}

ProcessGroup DeviceMesh::get_group(int64_t axis) const {
  check_axis(axis);
  return state_->groups[axis];
}

ProcessGroup DeviceMesh::get_group(std::string_view axis) const {
  return get_group(axis_index(axis));
}

ProcessGroup DeviceMesh::get_group() const {
  TORCH_CHECK_VALUE(ndim() == 1, "[DeviceMesh] ", str(), " has ", ndim(), " axes; say which");
  return get_group(0);
}

ProcessGroup DeviceMesh::whole_group() const {
  return detail::group_along(*state_->root, detail::concatenated(state_->axes));
}

DeviceMesh DeviceMesh::operator[](std::string_view axis) const {
  return (*this)[std::vector<std::string>{std::string(axis)}];
}

DeviceMesh DeviceMesh::operator[](std::initializer_list<std::string> axes) const {
  return (*this)[std::vector<std::string>(axes)];
}

DeviceMesh DeviceMesh::operator[](const std::vector<std::string>& axes) const {
  TORCH_CHECK_VALUE(!axes.empty(), "[DeviceMesh] a slice needs at least one axis");
  TORCH_CHECK_VALUE(
      !state_->names.empty(), "[DeviceMesh] ", str(),
      " has no axis names to slice by; give them to init_device_mesh");
  auto& root = *state_->root;
  std::vector<std::vector<int64_t>> sliced;
  for (const auto& name : axes) {
    const auto own = std::find(state_->names.begin(), state_->names.end(), name);
    std::lock_guard lock(root.mutex);
    const auto flat = root.flattened.find(name);
    TORCH_CHECK_INDEX(
        own != state_->names.end() || flat != root.flattened.end(), "[DeviceMesh] ", str(),
        " has no axis '", name, "'; it has ", detail::join(state_->names));
    sliced.push_back(
        own != state_->names.end() ? state_->axes[own - state_->names.begin()] : flat->second);
  }
  const auto all = detail::concatenated(sliced);
  TORCH_CHECK_VALUE(
      std::adjacent_find(all.begin(), all.end(), std::greater_equal<>()) == all.end(),
      "[DeviceMesh] the axes ", detail::join(axes),
      " overlap or are not in the mesh's own order: ", str());
  return detail::make_mesh(state_->root, sliced, axes);
}

DeviceMesh DeviceMesh::flatten(const std::string& name) const {
  TORCH_CHECK_VALUE(
      !state_->names.empty(), "[DeviceMesh] ", str(), " has no axis names: name them to flatten");
  const auto flat_name = name.empty() ? detail::join(state_->names, "_") : name;
  const auto axes = detail::concatenated(state_->axes);
  auto& root = *state_->root;
  {
    std::lock_guard lock(root.mutex);
    const auto known = root.flattened.find(flat_name);
    const bool taken = known != root.flattened.end() && known->second != axes;
    const bool is_axis = ndim() > 1 && std::find(root.names.begin(), root.names.end(), flat_name) !=
                                           root.names.end();
    TORCH_CHECK_VALUE(
        !taken && !is_axis, "[DeviceMesh] '", flat_name, "' already names another axis of ", str());
    root.flattened[flat_name] = axes;
  }
  return detail::make_mesh(state_->root, {axes}, {flat_name});
}

DeviceMesh concatenate(const DeviceMesh& first, const DeviceMesh& second) {
  const auto& a = *first.state_;
  const auto& b = *second.state_;
  const auto both = [&] { return first.str() + " and " + second.str(); };
  TORCH_CHECK_VALUE(
      !a.names.empty() && !b.names.empty(),
      "[DeviceMesh] to concatenate meshes their axes need names (mesh_dim_names): ", both());
  TORCH_CHECK_VALUE(
      a.root == b.root, "[DeviceMesh] ", both(),
      " cannot be concatenated: they are derived from different device meshs; make one with "
      "init_device_mesh and take slices of it");
  auto axes = a.axes;
  axes.insert(axes.end(), b.axes.begin(), b.axes.end());
  auto names = a.names;
  names.insert(names.end(), b.names.begin(), b.names.end());
  const auto all = detail::concatenated(axes);
  TORCH_CHECK_VALUE(
      std::set<int64_t>(all.begin(), all.end()).size() == all.size(),
      "[DeviceMesh] Cannot concatenate overlapping meshes: ", both());
  return detail::make_mesh(a.root, std::move(axes), std::move(names));
}

std::string DeviceMesh::str() const {
  std::vector<std::string> parts;
  for (size_t i = 0; i < state_->shape.size(); ++i) {
    const auto size = std::to_string(state_->shape[i]);
    parts.push_back(state_->names.empty() ? size : state_->names[i] + "=" + size);
  }
  return c10::str(
      "DeviceMesh(", c10::DeviceTypeName(device_type(), /*lower_case=*/true), ", ",
      detail::join(parts), ")");
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  const auto& a = *state_;
  const auto& b = *other.state_;
  return a.root->device_type == b.root->device_type && a.root->shape == b.root->shape &&
         a.root->ranks == b.root->ranks && a.groups == b.groups && a.axes == b.axes &&
         a.names == b.names;
}

int64_t DeviceMesh::axis_index(std::string_view axis) const {
  const auto& names = state_->names;
  const auto found = std::find(names.begin(), names.end(), axis);
  TORCH_CHECK_INDEX(
      found != names.end(), "[DeviceMesh] ", str(), " has no axis '", axis, "'; it has ",
      names.empty() ? "no names" : detail::join(names));
  return found - names.begin();
}

void DeviceMesh::check_axis(int64_t axis) const {
  TORCH_CHECK_INDEX(axis >= 0 && axis < ndim(), "[DeviceMesh] ", str(), " has no axis ", axis);
}

DeviceMesh init_device_mesh(
    c10::DeviceType device_type,
    const std::vector<int64_t>& shape,
    const std::vector<std::string>& names) {
  detail::check_names("init_device_mesh", names, shape.size());
  const auto world = default_group();
  int64_t product = shape.empty() ? 0 : 1;
  for (const auto size : shape) {
    TORCH_CHECK_VALUE(
        size > 0, "[init_device_mesh] axis sizes must be positive: ", c10::IntArrayRef(shape));
    // Above the world size the shape cannot fit; multiplying on could overflow.
    product = product > world.size() ? product : product * size;
  }
  TORCH_CHECK_VALUE(
      product == world.size(), "[init_device_mesh] the shape ", c10::IntArrayRef(shape),
      " multiplies to ", product, ", but the world has ", world.size(), " ranks");
  auto root = std::make_shared<detail::MeshRoot>();
  root->device_type = device_type;
  root->shape = shape;
  root->names = names;
  root->coordinate = detail::grid_coordinate(shape, world.rank());
  root->ranks = world.ranks();
  root->world = world;
  return detail::whole_mesh(std::move(root));
}

DeviceMesh DeviceMesh::from_groups(
    c10::DeviceType device_type,
    const std::vector<ProcessGroup>& groups,
    const std::vector<std::string>& names,
    const std::vector<int>& ranks) {
  TORCH_CHECK_VALUE(!groups.empty(), "[DeviceMesh::from_groups] there is no group");
  TORCH_CHECK_VALUE(
      groups.size() == 1 || !ranks.empty(), "[DeviceMesh::from_groups] ", groups.size(),
      " groups do not tell which ranks the other rows and columns have; give all ranks of the mesh "
      "as `ranks`, the index of the last axis changing fastest");
  detail::check_names("DeviceMesh::from_groups", names, groups.size());
  auto root = std::make_shared<detail::MeshRoot>();
  root->device_type = device_type;
  root->names = names;
  root->groups = groups;
  root->ranks = ranks.empty() ? groups.front().ranks() : ranks;
  size_t product = 1;
  for (const auto& group : groups) {
    root->shape.push_back(group.size());
    root->coordinate.push_back(group.rank());
    product *= static_cast<size_t>(group.size());
  }
  TORCH_CHECK_VALUE(
      product == root->ranks.size(), "[DeviceMesh::from_groups] groups of the sizes ",
      c10::IntArrayRef(root->shape), " make a mesh of ", product, " ranks, but ",
      root->ranks.size(), " are given");
  for (size_t axis = 0; axis < groups.size(); ++axis) {
    const auto along = detail::ranks_along(*root, {static_cast<int64_t>(axis)});
    TORCH_CHECK_VALUE(
        along == groups[axis].ranks(), "[DeviceMesh::from_groups] the group of axis ", axis,
        " has the ranks ", detail::join(groups[axis].ranks()), ", but the mesh has ",
        detail::join(along), " there: give the mesh its ranks in the order of the group");
  }
  return detail::whole_mesh(std::move(root));
}

} // namespace fsdp
