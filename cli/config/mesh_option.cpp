#include "cli/config/mesh_option.h"

#include <algorithm>
#include <charconv>
#include <ranges>
#include <set>
#include <vector>

#include <fsdp/distributed.h>

#include "cli/check.h"
#include "cli/nearest.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kMostRanks = 1 << 20; // the limit of `fsdp run`, too
const std::vector<std::string> kAxes{"dp", "replicate", "shard", "tp"};

int64_t parse_size(const std::string& part, const std::string& text, const std::string& mesh) {
  int64_t size = 0;
  const auto end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, size);
  check_config(
      error == std::errc() && stopped == end && size >= 1 && size <= kMostRanks, "--mesh ", mesh,
      ": '", part, "' must give a number of ranks, 1 or more, and ", kMostRanks, " at most");
  return size;
}

/// Leaves out axes with one rank, but keeps shard, which fully_shard needs.
DeviceMesh make_mesh(const MeshShape& shape, c10::DeviceType device) {
  std::vector<int64_t> sizes;
  std::vector<std::string> names;
  const auto add = [&](const char* name, int64_t size, bool always) {
    if (always || size > 1) {
      names.emplace_back(name);
      sizes.push_back(size);
    }
  };
  add("replicate", shape.replicate, false);
  add("shard", shape.shard, true);
  add("tp", shape.tensor, false);
  return init_device_mesh(device, sizes, names);
}

} // namespace

std::string MeshShape::str() const {
  return (replicate > 1 ? "dp=" + std::to_string(replicate) + "," : "") +
         "shard=" + std::to_string(shard) + (tensor > 1 ? ",tp=" + std::to_string(tensor) : "");
}

MeshShape parse_mesh(const std::string& text, std::optional<int64_t> ranks) {
  MeshShape shape;
  std::set<std::string> given;
  for (const auto piece : std::views::split(text, ',')) {
    const std::string part(piece.begin(), piece.end());
    const auto equals = part.find('=');
    check_config(
        equals != std::string::npos, "--mesh ", text, ": '", part,
        "' is not an axis; write for example --mesh dp=2,shard=2,tp=2");
    const auto axis = part.substr(0, equals);
    check_config(
        std::find(kAxes.begin(), kAxes.end(), axis) != kAxes.end(), "--mesh ", text,
        ": there is no axis '", axis, "'", did_you_mean(axis, kAxes));
    const auto name = axis == "replicate" ? "dp" : axis;
    check_config(given.insert(name).second, "--mesh ", text, ": ", name, " is given twice");
    auto& size = name == "dp" ? shape.replicate : name == "shard" ? shape.shard : shape.tensor;
    size = parse_size(part, part.substr(equals + 1), text);
  }
  check_config(
      shape.ranks() <= kMostRanks && ranks.value_or(1) <= kMostRanks,
      text.empty() ? "--ranks" : "--mesh " + text, ": ", std::max(shape.ranks(), ranks.value_or(1)),
      " ranks are too many; the limit is ", kMostRanks);
  if (ranks && !given.contains("shard")) {
    const auto others = shape.replicate * shape.tensor;
    check_config(
        *ranks % others == 0, "--mesh ", text, ": ", *ranks, " ranks cannot be divided by ", others,
        "; use for example --ranks ", (*ranks / others + 1) * others);
    shape.shard = *ranks / others;
  }
  check_config(
      !ranks || *ranks == shape.ranks(), "--mesh ", text, " makes ", shape.ranks(), " ranks, not ",
      ranks.value_or(0), "; leave out --ranks, or the size of shard");
  return shape;
}

MeshShape fit_mesh(const std::string& text, int64_t ranks) {
  auto shape = parse_mesh(text, std::nullopt);
  check_config(
      ranks % shape.tensor == 0, "--mesh ", text, ": ", ranks,
      " ranks are left, which tp=", shape.tensor, " does not divide");
  const auto data = ranks / shape.tensor;
  shape.replicate = data % shape.replicate == 0 ? shape.replicate : 1;
  shape.shard = data / shape.replicate;
  return shape;
}

TrainMesh::TrainMesh(const MeshShape& shape, c10::DeviceType device)
    : shape(shape), data(make_mesh(shape, device)) {
  const auto whole = data;
  data = shape.replicate > 1 ? whole[{"replicate", "shard"}] : whole["shard"];
  if (shape.tensor > 1) {
    tensor = whole["tp"];
  }
  // The tensor axis is the last one, so its ranks are neighbours. They get the same rows.
  data_rank = get_rank() / shape.tensor;
}

} // namespace fsdp::cli
