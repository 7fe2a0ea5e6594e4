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

/// The ranks of the world arranged in a grid with named axes, or a slice of
/// it: the part that contains this rank. A value: copies share their groups,
/// and slices share the groups of the mesh they come from.
class FSDP_API DeviceMesh {
 public:
  c10::DeviceType device_type() const;
  int64_t ndim() const;
  const std::vector<int64_t>& shape() const;
  /// As many as axes, or none.
  const std::vector<std::string>& names() const;

  int64_t size() const;
  int64_t size(int64_t axis) const;
  int64_t size(std::string_view axis) const;

  /// The world ranks of this mesh, the last axis running fastest.
  std::vector<int> ranks() const;
  /// This rank's place along every axis, or along one.
  std::vector<int64_t> get_coordinate() const;
  int64_t get_local_rank(int64_t axis) const;
  int64_t get_local_rank(std::string_view axis) const;
  /// Only for a mesh of one axis.
  int64_t get_local_rank() const;

  /// This rank's group along one axis.
  ProcessGroup get_group(int64_t axis) const;
  ProcessGroup get_group(std::string_view axis) const;
  /// Only for a mesh of one axis.
  ProcessGroup get_group() const;

  /// The slice along the named axes, in their order in the mesh; names that
  /// `flatten` gave count too.
  DeviceMesh operator[](std::string_view axis) const;
  DeviceMesh operator[](const std::vector<std::string>& axes) const;
  DeviceMesh operator[](std::initializer_list<std::string> axes) const;

  /// All axes of this mesh as one, whose name is then known to the whole
  /// mesh. Collective over the world. The default name joins the axes' with
  /// '_'.
  DeviceMesh flatten(const std::string& name = "") const;

  /// "DeviceMesh(cpu, dp=2, tp=4)"
  std::string str() const;

  /// The same axes of the same arrangement of ranks.
  bool operator==(const DeviceMesh& other) const;

  friend FSDP_API DeviceMesh concatenate(const DeviceMesh& first, const DeviceMesh& second);

  // Made by init_device_mesh and by slicing.
  explicit DeviceMesh(std::shared_ptr<const detail::MeshState> state);

 private:
  int64_t axis_index(std::string_view axis) const;
  void check_axis(int64_t axis) const;

  std::shared_ptr<const detail::MeshState> state_;
};

/// Arranges the default group's ranks, the last axis running fastest, and
/// connects one group per axis. Collective over the world. Throws unless the
/// shape multiplies to the world size.
FSDP_API DeviceMesh init_device_mesh(
    c10::DeviceType device_type,
    const std::vector<int64_t>& shape,
    const std::vector<std::string>& names = {});

/// The axes of both, in this order, of two named slices of one mesh that have no
/// axis in common.
FSDP_API DeviceMesh concatenate(const DeviceMesh& first, const DeviceMesh& second);

} // namespace fsdp
