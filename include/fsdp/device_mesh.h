#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <fsdp/export.h>
#include <fsdp/process_group.h>

namespace fsdp {

namespace detail {
struct MeshState;
}

/// The ranks of the world arranged in a grid whose axes may have names, or a slice of such a
/// grid: the part that contains this rank. A value type: copies share their process groups, and
/// slices share those of the mesh they come from. See init_device_mesh.
class FSDP_API DeviceMesh {
 public:
  /// A mesh over groups that exist already, one per axis. For several axes `ranks` has the world
  /// ranks of the whole mesh, the index of the last axis changing fastest. Not collective.
  static DeviceMesh from_groups(
      c10::DeviceType device_type,
      const std::vector<ProcessGroup>& groups,
      const std::vector<std::string>& names = {},
      const std::vector<int>& ranks = {});

  c10::DeviceType device_type() const;
  int64_t ndim() const;
  const std::vector<int64_t>& shape() const;
  /// One name per axis, or none at all.
  const std::vector<std::string>& names() const;

  int64_t size() const;
  int64_t size(int64_t axis) const;
  int64_t size(std::string_view axis) const;

  /// The world ranks in this mesh. The index of the last axis changes fastest.
  std::vector<int> ranks() const;
  /// This rank's index along every axis, or along one.
  std::vector<int64_t> get_coordinate() const;
  int64_t get_local_rank(int64_t axis) const;
  int64_t get_local_rank(std::string_view axis) const;
  /// Only for a mesh of one axis.
  int64_t get_local_rank() const;

  /// The process group of this rank along one axis.
  ProcessGroup get_group(int64_t axis) const;
  ProcessGroup get_group(std::string_view axis) const;
  /// Only for a mesh of one axis.
  ProcessGroup get_group() const;
  /// The process group of all ranks of this mesh, in the order of `ranks()`. Collective over them.
  ProcessGroup whole_group() const;

  /// The slice along the named axes. The axes must be given in the mesh's own order. Names that
  /// `flatten` introduced can be used, too.
  DeviceMesh operator[](std::string_view axis) const;
  DeviceMesh operator[](const std::vector<std::string>& axes) const;
  DeviceMesh operator[](std::initializer_list<std::string> axes) const;

  /// Merges all axes of this mesh into one. The mesh that this one was sliced from knows the new
  /// axis by its name. By default that is the names of the axes, joined with '_'. Collective over
  /// the world.
  DeviceMesh flatten(const std::string& name = "") const;

  /// "DeviceMesh(cpu, dp=2, tp=4)"
  std::string str() const;

  /// Whether both have the same axes in the same arrangement of ranks.
  bool operator==(const DeviceMesh& other) const;

  friend FSDP_API DeviceMesh concatenate(const DeviceMesh& first, const DeviceMesh& second);

  // For the library itself. Users call init_device_mesh or take a slice.
  explicit DeviceMesh(std::shared_ptr<const detail::MeshState> state);

 private:
  int64_t axis_index(std::string_view axis) const;
  void check_axis(int64_t axis) const;

  std::shared_ptr<const detail::MeshState> state_;
};

/// Arranges all ranks of the world in a grid, with the index of the last axis changing fastest,
/// and connects one process group per axis. Throws ValueError if the product of `shape` is not
/// the world size. Collective over the world.
FSDP_API DeviceMesh init_device_mesh(
    c10::DeviceType device_type,
    const std::vector<int64_t>& shape,
    const std::vector<std::string>& names = {});

/// A mesh with the axes of `first`, then those of `second`. Both must be slices of one mesh, with
/// names and without a common axis.
FSDP_API DeviceMesh concatenate(const DeviceMesh& first, const DeviceMesh& second);

} // namespace fsdp
