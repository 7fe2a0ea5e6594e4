#include "layout/shard_layout.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::detail {

namespace {

/// Translates `local`, runs of the elements that `whole` lists, to runs in the numbering of
/// `whole`.
std::vector<Run> compose_runs(const std::vector<Run>& whole, const std::vector<Run>& local) {
  std::vector<Run> result;
  for (const auto& run : local) {
    int64_t start = run.offset;
    int64_t left = run.length;
    for (const auto& piece : whole) {
      if (start >= piece.length) {
        start -= piece.length;
        continue;
      }
      const auto taken = std::min(left, piece.length - start);
      if (taken > 0) {
        result.push_back({piece.offset + start, taken});
      }
      left -= taken;
      start = 0;
    }
  }
  return result;
}

} // namespace

Run chunk_run(int64_t size, int64_t count, int64_t index) {
  const int64_t chunk = (size + count - 1) / count;
  const int64_t offset = std::min(size, chunk * index);
  return {offset, std::min(size - offset, chunk)};
}

std::vector<Run> ShardStep::runs(int64_t length, int64_t index) const {
  std::vector<Run> result;
  for (int64_t i = 0; i < split_factor; ++i) {
    const auto outer = chunk_run(length, split_factor, i);
    const auto inner = chunk_run(outer.length, num_ranks, index);
    if (inner.length > 0) {
      result.push_back({outer.offset + inner.offset, inner.length});
    }
  }
  return result;
}

int64_t ShardStep::length(int64_t length, int64_t index) const {
  int64_t total = 0;
  for (const auto& run : runs(length, index)) {
    total += run.length;
  }
  return total;
}

std::vector<ShardStep> shard_steps(
    const std::vector<Placement>& placements, const std::vector<int64_t>& mesh_shape, int64_t dim) {
  std::vector<ShardStep> steps;
  for (size_t i = placements.size(); i-- > 0;) {
    if (shard_dim(placements[i]) != dim) {
      continue;
    }
    const auto* strided = std::get_if<StridedShard>(&placements[i]);
    ShardStep step{.axis = static_cast<int64_t>(i), .num_ranks = mesh_shape[i]};
    auto where = steps.begin();
    if (strided) {
      int64_t divided = 1;
      while (divided < strided->split_factor && where != steps.end()) {
        divided *= where->num_ranks;
        ++where;
      }
      if (divided != strided->split_factor) {
        where = steps.begin();
        step.split_factor = strided->split_factor;
      }
    }
    steps.insert(where, step);
  }
  return steps;
}

std::vector<Run> local_runs(
    int64_t size, const std::vector<ShardStep>& steps, const std::vector<int64_t>& coordinate) {
  std::vector<Run> runs;
  if (size > 0) {
    runs.push_back({0, size});
  }
  int64_t length = size;
  for (const auto& step : steps) {
    const auto index = coordinate[step.axis];
    runs = compose_runs(runs, step.runs(length, index));
    length = step.length(length, index);
  }
  return runs;
}

int64_t local_length(
    int64_t size, const std::vector<ShardStep>& steps, const std::vector<int64_t>& coordinate) {
  for (const auto& step : steps) {
    size = step.length(size, coordinate[step.axis]);
  }
  return size;
}

std::optional<BlockStep> block_step(
    const std::vector<Placement>& placements, const std::vector<int64_t>& mesh_shape) {
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (const auto* blocks = std::get_if<BlockShard>(&placements[axis])) {
      return BlockStep{static_cast<int64_t>(axis), blocks->dims, mesh_shape[axis]};
    }
  }
  return std::nullopt;
}

std::vector<int64_t> merged_sizes(std::vector<int64_t> sizes, int64_t dims) {
  const auto last = static_cast<size_t>(dims - 1);
  for (size_t dim = 0; dim < last; ++dim) {
    sizes[last] *= std::exchange(sizes[dim], 1);
  }
  return sizes;
}

std::vector<int64_t> sizes_before_blocks(
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    const std::vector<int64_t>& mesh_shape,
    const std::vector<int64_t>& coordinate) {
  auto result = sizes;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    result[dim] = local_length(
        sizes[dim], shard_steps(placements, mesh_shape, static_cast<int64_t>(dim)), coordinate);
  }
  return result;
}

std::vector<int64_t> local_sizes(
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    const std::vector<int64_t>& mesh_shape,
    const std::vector<int64_t>& coordinate) {
  auto result = sizes_before_blocks(sizes, placements, mesh_shape, coordinate);
  if (const auto blocks = block_step(placements, mesh_shape)) {
    result = merged_sizes(std::move(result), blocks->dims);
    auto& rows = result[static_cast<size_t>(blocks->dims - 1)];
    rows = chunk_run(rows, blocks->num_ranks, coordinate[blocks->axis]).length;
  }
  return result;
}

std::vector<Placement> normalized(
    std::vector<Placement> placements, int64_t ndim, int64_t num_axes) {
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(placements.size()) == num_axes, "[DTensor] ", to_string(placements),
      " has ", placements.size(), " placements for a mesh of ", num_axes, " axes");
  const auto normalize = [&](int64_t& dim, const Placement& placement) {
    TORCH_CHECK_VALUE(
        dim >= -ndim && dim < ndim, "[DTensor] ", to_string(placement),
        " does not fit a tensor of ", ndim, " dims");
    dim = dim < 0 ? dim + ndim : dim;
  };
  bool has_blocks = false;
  for (auto& placement : placements) {
    if (auto* shard = std::get_if<Shard>(&placement)) {
      normalize(shard->dim, placement);
    } else if (auto* strided = std::get_if<StridedShard>(&placement)) {
      normalize(strided->dim, placement);
      TORCH_CHECK_VALUE(
          strided->split_factor >= 1, "[DTensor] ", to_string(placement),
          ": the split factor must be positive");
    } else if (const auto* blocks = std::get_if<BlockShard>(&placement)) {
      TORCH_CHECK_VALUE(
          blocks->dims >= 2 && blocks->dims <= ndim, "[DTensor] ", to_string(placement),
          " does not fit a tensor of ", ndim, " dims; it merges two or more");
      TORCH_CHECK_VALUE(
          !std::exchange(has_blocks, true), "[DTensor] ", to_string(placements),
          ": only one axis can have a BlockShard");
    }
  }
  return placements;
}

bool divides(const Placement& placement) {
  return shard_dim(placement) >= 0 || std::holds_alternative<BlockShard>(placement);
}

int64_t shard_dim(const Placement& placement) {
  if (const auto* shard = std::get_if<Shard>(&placement)) {
    return shard->dim;
  }
  if (const auto* strided = std::get_if<StridedShard>(&placement)) {
    return strided->dim;
  }
  return -1;
}

} // namespace fsdp::detail
