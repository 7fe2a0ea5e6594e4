#include "checkpoint/plan.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <map>

#include "base/check.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/json_text.h"
#include "checkpoint/safetensors.h"
#include "layout/mesh_layout.h"

namespace fsdp::detail {

namespace {

using nlohmann::json;

constexpr const char* kWhere = "[save]";

/// Returns the index of the mesh in `meshes`. Adds the mesh to them at its first use.
int64_t number_of(const DeviceMesh& mesh, std::vector<DeviceMesh>& meshes) {
  const auto number = std::find(meshes.begin(), meshes.end(), mesh) - meshes.begin();
  if (number == std::ssize(meshes)) {
    meshes.push_back(mesh);
  }
  return number;
}

json describe(
    const std::string& key, const StateDict::Value& value, std::vector<DeviceMesh>& meshes) {
  const auto where = c10::str(kWhere, " '", key, "'");
  const auto tensor = local_tensor(value);
  if (!tensor) {
    return {{"key", key}}; // values may differ: the first rank's is saved
  }
  FSDP_CHECK_AS(CheckpointError, tensor->local.defined(), where, ": an undefined tensor");
  FSDP_CHECK_AS(
      CheckpointError,
      tensor->local.layout() == at::kStrided && !tensor->local.is_meta() &&
          !tensor->local.is_quantized(),
      where, ": only dense tensors with values can be saved, not ", tensor->local.toString());
  json result{
      {"key", key},
      {"dtype", dtype_name(tensor->local.scalar_type(), where)},
      {"shape", tensor->sizes}};
  if (const auto* spread = std::get_if<DTensor>(&value)) {
    for (const auto& placement : spread->placements()) {
      FSDP_CHECK_AS(
          CheckpointError, !std::holds_alternative<Partial>(placement), where,
          ": its terms have not been added up (", to_string(spread->placements()),
          "): redistribute it first");
    }
    result["mesh"] = number_of(spread->device_mesh(), meshes);
    result["mesh_shape"] = spread->device_mesh().shape();
    result["placements"] = to_string(spread->placements());
  }
  return result;
}

/// A rank that has a key, and the number that this rank gave to the tensor's mesh.
struct Holder {
  int rank = 0;
  size_t mesh = 0;
};

/// All keys of all ranks: the keys of rank 0, then further keys of rank 1, and so on.
struct Merged {
  std::vector<json> items;
  std::vector<std::vector<Holder>> holders;
  std::map<std::string, size_t> index;
};

Merged merge(const std::vector<std::string>& lists, int world_size) {
  Merged merged;
  const bool all_equal = lists.size() == 1;
  for (int rank = 0; rank < static_cast<int>(lists.size()); ++rank) {
    for (auto& item : json::parse(lists[static_cast<size_t>(rank)])) {
      const auto key = item.at("key").get<std::string>();
      const auto mesh = item.value("mesh", size_t{0});
      item.erase("mesh"); // each rank has its own numbers
      const auto [found, is_new] = merged.index.emplace(key, merged.items.size());
      if (is_new) {
        merged.items.push_back(item);
        merged.holders.emplace_back();
      }
      const auto& first = merged.items[found->second];
      auto& holders = merged.holders[found->second];
      FSDP_CHECK_AS(
          CheckpointError, first == item, kWhere, " '", key,
          "' is not the same on all ranks: ", first.dump(), " on rank ",
          is_new ? rank : holders[0].rank, ", ", item.dump(), " on rank ", rank);
      for (int other = rank; other < (all_equal ? world_size : rank + 1); ++other) {
        holders.push_back({other, mesh});
      }
    }
  }
  return merged;
}

/// Returns the ranks that hold the same part of the tensor as this rank.
std::vector<Holder> holders_of_part(
    const DTensor& spread,
    const std::vector<Holder>& holders,
    const std::vector<std::vector<int64_t>>& mesh_indices) {
  const auto& mesh = spread.device_mesh();
  const auto& placements = spread.placements();
  const auto mine = mesh.get_coordinate();
  std::vector<Holder> result;
  for (const auto& holder : holders) {
    const auto mesh_index = mesh_indices[static_cast<size_t>(holder.rank)].at(holder.mesh);
    const auto theirs = grid_coordinate(mesh.shape(), mesh_index);
    bool same = true;
    for (size_t axis = 0; axis < placements.size(); ++axis) {
      same &= std::holds_alternative<Replicate>(placements[axis]) || theirs[axis] == mine[axis];
    }
    if (same) {
      result.push_back(holder);
    }
  }
  return result;
}

/// `item` describes a tensor.
StoredTensor tensor_of(const json& item) {
  return {
      item.at("key").get<std::string>(),
      dtype_of(item.at("dtype").get<std::string>(), kWhere),
      item.at("shape").get<std::vector<int64_t>>(),
      {}};
}

/// Returns for each tensor the position of its middle among the bytes of all tensors with the same
/// placement, from 0 to 1.
std::vector<double> shares(const std::vector<json>& items) {
  std::map<std::string, int64_t> totals;
  std::vector<std::string> placements;
  std::vector<int64_t> middles;
  for (const auto& item : items) {
    int64_t bytes = 0;
    if (item.contains("dtype")) {
      const auto tensor = tensor_of(item);
      bytes = *tensor_bytes(tensor.sizes, tensor.dtype);
    }
    placements.push_back(
        item.contains("placements") ? item.at("placements").dump() + item.at("mesh_shape").dump()
                                    : "");
    auto& total = totals[placements.back()];
    middles.push_back(total + bytes / 2);
    total += bytes;
  }
  std::vector<double> result;
  for (size_t i = 0; i < items.size(); ++i) {
    const auto total = std::max<int64_t>(totals[placements[i]], 1);
    result.push_back(static_cast<double>(middles[i]) / static_cast<double>(total));
  }
  return result;
}

/// Joins two parts if they are neighbours in the tensor and in memory, as the experts of a
/// BlockShard are. Each part of a tensor takes a file of its own.
std::optional<Part> joined(const Part& first, const Part& second) {
  const auto& from = first.box;
  const auto& to = second.box;
  size_t dim = 0;
  while (dim < from.sizes.size() && from.sizes[dim] == 1 && to.sizes[dim] == 1 &&
         from.offsets[dim] == to.offsets[dim]) {
    ++dim;
  }
  if (dim == from.sizes.size() || from.offsets[dim] + from.sizes[dim] != to.offsets[dim] ||
      !first.data.is_contiguous() || !second.data.is_contiguous() ||
      first.data.storage_offset() + first.data.numel() != second.data.storage_offset()) {
    return std::nullopt;
  }
  for (auto other = dim + 1; other < from.sizes.size(); ++other) {
    if (from.sizes[other] != to.sizes[other] || from.offsets[other] != to.offsets[other]) {
      return std::nullopt;
    }
  }
  Part both = first;
  both.box.sizes[dim] += to.sizes[dim];
  both.data = first.data.as_strided(both.box.sizes, c10::contiguous_strides(both.box.sizes));
  return both;
}

void add_parts(const std::string& key, const LocalTensor& tensor, std::vector<Part>& parts) {
  const auto num_before = parts.size();
  for (const auto& [box, at] : tensor.boxes) {
    auto data = tensor.local.detach();
    if (box.numel() == 0) { // the whole tensor is empty; the local part may have other sizes
      data = at::empty(box.sizes, data.options());
    }
    for (size_t dim = 0; dim < at.size(); ++dim) {
      data = data.narrow(static_cast<int64_t>(dim), at[dim], box.sizes[dim]);
    }
    parts.push_back({key, box, std::move(data)});
    while (parts.size() > num_before + 1) {
      auto both = joined(parts.end()[-2], parts.back());
      if (!both) {
        break;
      }
      parts.pop_back();
      parts.back() = std::move(*both);
    }
  }
}

StoredValue stored_value(const StateDict::Value& value) {
  return std::visit(
      [](const auto& held) -> StoredValue {
        if constexpr (
            std::is_constructible_v<StoredValue, std::decay_t<decltype(held)>> &&
            !std::is_same_v<std::decay_t<decltype(held)>, at::Tensor>) {
          return held;
        } else {
          TORCH_INTERNAL_ASSERT(false);
        }
      },
      value);
}

} // namespace

std::optional<LocalTensor> local_tensor(const StateDict::Value& value) {
  if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
    auto sizes = tensor->defined() ? tensor->sizes().vec() : std::vector<int64_t>{};
    auto box = Box::whole(sizes);
    return LocalTensor{*tensor, std::move(sizes), {{box, box.offsets}}};
  }
  if (const auto* spread = std::get_if<DTensor>(&value)) {
    const auto& mesh = spread->device_mesh();
    auto boxes = local_boxes(
        spread->sizes().vec(), spread->placements(), mesh.shape(), mesh.get_coordinate());
    // An empty tensor gets one empty piece, so that it is in a file.
    if (boxes.empty() && spread->numel() == 0) {
      const auto box = Box::whole(spread->sizes().vec());
      boxes.push_back({box, box.offsets});
    }
    return LocalTensor{spread->to_local(), spread->sizes().vec(), std::move(boxes)};
  }
  return std::nullopt;
}

std::string PlanRequest::checksum() const {
  return c10::str(crc32c(list.data(), list.size()), "-", list.size());
}

PlanRequest make_request(const StateDict& state) {
  std::vector<DeviceMesh> meshes;
  auto list = json::array();
  for (const auto& [key, value] : state) {
    list.push_back(describe(key, value, meshes));
  }
  auto mesh_indices = json::array();
  for (const auto& mesh : meshes) {
    mesh_indices.push_back(grid_index(mesh.shape(), mesh.get_coordinate()));
  }
  return {json_text(list, kWhere), json_text(mesh_indices, kWhere)};
}

SavePlan make_plan(
    const StateDict& state,
    int rank,
    const std::vector<std::string>& lists,
    const std::vector<std::string>& mesh_indices) {
  std::vector<std::vector<int64_t>> indices_of_ranks;
  for (const auto& text : mesh_indices) {
    indices_of_ranks.push_back(json::parse(text).get<std::vector<int64_t>>());
  }
  const auto merged = merge(lists, static_cast<int>(mesh_indices.size()));
  const auto share = shares(merged.items);
  SavePlan plan;
  for (const auto& item : merged.items) {
    if (item.contains("dtype")) {
      plan.catalog.tensors.push_back(tensor_of(item));
    }
  }
  for (const auto& [key, value] : state) {
    const auto index = merged.index.at(key);
    const auto& holders = merged.holders[index];
    const auto tensor = local_tensor(value);
    if (!tensor) {
      if (holders[0].rank == rank) {
        plan.catalog.values.emplace_back(key, stored_value(value));
      }
      continue;
    }
    const auto* spread = std::get_if<DTensor>(&value);
    const auto writers = spread && spread->numel() > 0
                             ? holders_of_part(*spread, holders, indices_of_ranks)
                             : holders;
    const auto turn = static_cast<size_t>(share[index] * static_cast<double>(writers.size()));
    if (writers[std::min(turn, writers.size() - 1)].rank == rank) {
      add_parts(key, *tensor, plan.parts);
    }
  }
  plan.catalog.index(kWhere);
  return plan;
}

} // namespace fsdp::detail
