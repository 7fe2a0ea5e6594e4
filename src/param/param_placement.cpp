#include "param/param_placement.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "layout/shard_layout.h"
#include "param/fsdp_param.h"

namespace fsdp::detail {

namespace {

/// Collects the axes of a mesh and their placements.
struct Axes {
  std::optional<DeviceMesh> mesh = {};
  std::vector<Placement> placements = {};

  void add(const DeviceMesh& more, const std::vector<Placement>& placed) {
    mesh = mesh ? concatenate(*mesh, more) : more;
    placements.insert(placements.end(), placed.begin(), placed.end());
  }
};

/// Data parallelism divides last, as a BlockShard always does. If a later axis divides the same
/// dim, the Shard of data parallelism becomes a StridedShard.
TensorSpec divided_last(Axes axes, size_t shard_axis, std::vector<int64_t> sizes) {
  const auto dim = shard_dim(axes.placements[shard_axis]);
  int64_t split_factor = 1;
  for (size_t axis = shard_axis + 1; axis < axes.placements.size(); ++axis) {
    const bool divides_same = dim >= 0 && shard_dim(axes.placements[axis]) == dim;
    split_factor *= divides_same ? axes.mesh->shape()[axis] : 1;
  }
  if (split_factor > 1) {
    axes.placements[shard_axis] = StridedShard{dim, split_factor};
  }
  return {std::move(*axes.mesh), std::move(axes.placements), std::move(sizes)};
}

/// Returns the placement on the whole mesh, with the axes in mesh order and the shard axes as one.
TensorSpec placed_in_whole(
    const DataParallelMesh& mesh, const Placement& shard, const TensorPiece& piece) {
  const auto& [whole, dims] = *mesh.parent;
  const auto& spec = piece.spec();
  const auto lists = [](const auto& names, const auto& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  Axes axes;
  std::optional<size_t> shard_axis;
  for (const auto& name : whole.names()) {
    if (lists(dims.shard, name)) {
      if (!shard_axis) {
        shard_axis = axes.placements.size();
        axes.add(*mesh.shard_mesh(), {shard});
      }
      continue;
    }
    const auto own = std::find(spec.mesh.names().begin(), spec.mesh.names().end(), name);
    const auto placement = own == spec.mesh.names().end()
                               ? Placement(Replicate{})
                               : spec.placements[own - spec.mesh.names().begin()];
    axes.add(whole[name], {placement});
  }
  // If no axes were merged, this is the mesh that was given.
  return shard_axis ? divided_last(std::move(axes), *shard_axis, spec.sizes)
                    : TensorSpec{*axes.mesh, axes.placements, spec.sizes};
}

void check_in_whole(const DataParallelMesh& mesh, const TensorPiece* piece) {
  const auto& [whole, dims] = *mesh.parent;
  TORCH_CHECK_VALUE(
      piece,
      "When dp_mesh_dims is given, all parameters must be DTensors on the mesh: place this one "
      "there by distribute_module or parallelize_module first, or leave dp_mesh_dims out and give "
      "the slice of the mesh over which to shard");
  const auto& spec = piece->spec();
  const auto& known = whole.names();
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    const auto& names = spec.mesh.names();
    TORCH_CHECK_VALUE(
        !names.empty() && std::find(known.begin(), known.end(), names[axis]) != known.end() &&
            whole[names[axis]] == spec.mesh[names[axis]],
        "it lies on ", spec.mesh.str(), ", which is not the same mesh as the one given, ",
        whole.str(), ", or a slice of it");
    for (const auto* own : {&dims.shard, &dims.replicate}) {
      TORCH_CHECK_VALUE(
          std::find(own->begin(), own->end(), names[axis]) == own->end() ||
              std::holds_alternative<Replicate>(spec.placements[axis]),
          "Expected Replicate() on the axis '", names[axis],
          "', which dp_mesh_dims gives to data parallelism, but got ",
          to_string(spec.placements[axis]));
    }
  }
}

} // namespace

TensorSpec data_parallel_placement(
    const DataParallelMesh& mesh,
    const Placement& shard,
    const std::vector<int64_t>& sizes,
    const TensorPiece* piece) {
  TORCH_CHECK_VALUE(
      !piece || !mesh.shard_axis ||
          !block_step(piece->spec().placements, piece->spec().mesh.shape()),
      "it is divided by a BlockShard already, and nothing can be divided after that: give the "
      "BlockShard to shard_placement_fn, and another placement to distribute_parameter");
  if (mesh.parent) {
    check_in_whole(mesh, piece);
    return placed_in_whole(mesh, shard, *piece);
  }
  Axes axes;
  axes.add(mesh.mesh, std::vector<Placement>(mesh.mesh.ndim(), Replicate{}));
  if (mesh.shard_axis) {
    axes.placements[*mesh.shard_axis] = shard;
  }
  if (piece) {
    axes.add(piece->spec().mesh, piece->spec().placements);
  }
  return mesh.shard_axis ? divided_last(std::move(axes), *mesh.shard_axis, sizes)
                         : TensorSpec{*axes.mesh, axes.placements, sizes};
}

std::optional<TensorSpec> placement_of(const at::Tensor& param) {
  const auto* managed = FSDPParam::find(param);
  const auto piece = TensorPiece::find(param);
  if (managed) {
    const auto& geometry = managed->geometry();
    return data_parallel_placement(
        managed->mesh(), geometry.placement(), piece ? piece->spec().sizes : geometry.sizes,
        piece.get());
  }
  return piece ? std::optional(piece->spec()) : std::nullopt;
}

std::vector<ParamAxis> axes_of(const at::Tensor& param) {
  std::vector<ParamAxis> axes;
  const auto add = [&](const ProcessGroup& group, at::DeviceType type, bool divides) {
    if (group.size() > 1) {
      // An offloaded parameter is not on the device that its group communicates on.
      const auto device = param.device().type() == type ? param.device() : at::Device(type);
      axes.push_back({group, device, divides});
    }
  };
  if (const auto* managed = FSDPParam::find(param)) {
    const auto& mesh = managed->mesh();
    add(mesh.shard_group, mesh.mesh.device_type(), true);
    if (mesh.replicate_group) {
      add(*mesh.replicate_group, mesh.mesh.device_type(), false);
    }
  }
  if (const auto piece = TensorPiece::find(param)) {
    const auto& spec = piece->spec();
    for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
      add(spec.mesh.get_group(static_cast<int64_t>(axis)), spec.mesh.device_type(),
          divides(spec.placements[axis]));
    }
  }
  return axes;
}

std::string name_of(const at::Tensor& param) {
  const auto* managed = FSDPParam::find(param);
  const auto piece = TensorPiece::find(param);
  return managed ? managed->name() : piece ? piece->name() : "";
}

} // namespace fsdp::detail
