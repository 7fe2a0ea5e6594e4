#include "layout/box.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "layout/mesh_layout.h"
#include "layout/shard_layout.h"

namespace fsdp::detail {

namespace {

int64_t product(const std::vector<int64_t>& sizes, size_t first_dim = 0) {
  return std::accumulate(
      sizes.begin() + static_cast<std::ptrdiff_t>(first_dim), sizes.end(), int64_t{1},
      std::multiplies<>());
}

int64_t index_in(const Block& block, const std::vector<int64_t>& element) {
  int64_t index = 0;
  for (size_t dim = 0; dim < element.size(); ++dim) {
    index = index * block.sizes[dim] + element[dim] - block.origin[dim];
  }
  return index;
}

__extension__ using Wide = unsigned __int128;
constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;

/// Returns a random number for an index along a dim, always the same in this process.
uint64_t mark(size_t dim, int64_t index) {
  static const uint64_t secret = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  // The mixing function of SplitMix64, twice.
  uint64_t number = secret + dim;
  for (const auto more : {uint64_t{0}, static_cast<uint64_t>(index)}) {
    number = (number ^ more) + 0x9e3779b97f4a7c15;
    number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
    number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
    number ^= number >> 31;
  }
  return number % kPrime;
}

/// The volume of a box, see Note [Tiles].
uint64_t random_volume(const std::vector<int64_t>& offsets, const std::vector<int64_t>& sizes) {
  Wide volume = 1;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    const auto length = mark(dim, offsets[dim] + sizes[dim]) + kPrime - mark(dim, offsets[dim]);
    volume = volume * (length % kPrime) % kPrime;
  }
  return static_cast<uint64_t>(volume);
}

} // namespace

int64_t Box::numel() const {
  return product(sizes);
}

Box Box::whole(const std::vector<int64_t>& sizes) {
  return {std::vector<int64_t>(sizes.size(), 0), sizes};
}

std::optional<Box> intersection(const Box& first, const Box& second) {
  const auto begin = [&](size_t dim) { return std::max(first.offsets[dim], second.offsets[dim]); };
  const auto end = [&](size_t dim) {
    return std::min(first.offsets[dim] + first.sizes[dim], second.offsets[dim] + second.sizes[dim]);
  };
  for (size_t dim = 0; dim < first.sizes.size(); ++dim) { // most boxes share nothing: no copies yet
    if (begin(dim) >= end(dim)) {
      return std::nullopt;
    }
  }
  Box result = first;
  for (size_t dim = 0; dim < first.sizes.size(); ++dim) {
    result.offsets[dim] = begin(dim);
    result.sizes[dim] = end(dim) - begin(dim);
  }
  return result;
}

bool tile(const std::vector<Box>& boxes, const std::vector<int64_t>& sizes) {
  uint64_t covered = 0;
  for (const auto& box : boxes) {
    if (box.offsets.size() != sizes.size() || box.sizes.size() != sizes.size()) {
      return false;
    }
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      // These comparisons cannot overflow, in this order.
      if (box.offsets[dim] < 0 || box.sizes[dim] < 0 || box.offsets[dim] > sizes[dim] ||
          box.sizes[dim] > sizes[dim] - box.offsets[dim]) {
        return false;
      }
    }
    covered = (covered + random_volume(box.offsets, box.sizes)) % kPrime;
  }
  return covered == random_volume(std::vector<int64_t>(sizes.size(), 0), sizes);
}

namespace {

std::vector<LocalBox> boxes_before_blocks(
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    const std::vector<int64_t>& mesh_shape,
    const std::vector<int64_t>& coordinate) {
  std::vector<LocalBox> boxes(1);
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    const auto steps = shard_steps(placements, mesh_shape, static_cast<int64_t>(dim));
    const auto runs = local_runs(sizes[dim], steps, coordinate);
    std::vector<LocalBox> longer;
    for (const auto& box : boxes) {
      int64_t at = 0;
      for (size_t i = 0; i < runs.size(); ++i) {
        Run run = runs[i];
        while (i + 1 < runs.size() && runs[i + 1].offset == run.offset + run.length) {
          run.length += runs[++i].length;
        }
        auto next = box;
        next.box.offsets.push_back(run.offset);
        next.box.sizes.push_back(run.length);
        next.at.push_back(at);
        at += run.length;
        longer.push_back(std::move(next));
      }
    }
    boxes = std::move(longer);
  }
  return boxes;
}

/// Returns the boxes of these merged rows of a local tensor of `sizes`. Each box lies at one index
/// of the merged dims, the last of them left out, so that it is a box of the local tensor, too.
/// `whole` are the boxes of the local tensor with all rows.
std::vector<LocalBox> boxes_of_rows(
    const std::vector<LocalBox>& whole,
    const std::vector<int64_t>& sizes,
    int64_t dims,
    const Run& rows) {
  const auto last = static_cast<size_t>(dims - 1);
  const std::vector<int64_t> outer(sizes.begin(), sizes.begin() + dims - 1);
  const auto per_index = sizes[last];
  std::vector<LocalBox> boxes;
  for (auto row = rows.offset; row < rows.offset + rows.length;) {
    const auto index = row / per_index;
    const auto end = std::min((index + 1) * per_index, rows.offset + rows.length);
    Box part = Box::whole(sizes); // of the local tensor
    const auto at_index = grid_coordinate(outer, index);
    std::copy(at_index.begin(), at_index.end(), part.offsets.begin());
    std::fill_n(part.sizes.begin(), last, 1);
    part.offsets[last] = row - index * per_index;
    part.sizes[last] = end - row;
    for (const auto& [box, at] : whole) {
      if (auto common = intersection(part, {at, box.sizes})) {
        LocalBox found{{box.offsets, common->sizes}, std::vector<int64_t>(sizes.size(), 0)};
        for (size_t dim = 0; dim < sizes.size(); ++dim) {
          found.box.offsets[dim] += common->offsets[dim] - at[dim];
          found.at[dim] = dim > last ? common->offsets[dim] : 0;
        }
        found.at[last] = row - rows.offset + common->offsets[last] - part.offsets[last];
        boxes.push_back(std::move(found));
      }
    }
    row = end;
  }
  return boxes;
}

} // namespace

std::vector<LocalBox> local_boxes(
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    const std::vector<int64_t>& mesh_shape,
    const std::vector<int64_t>& coordinate) {
  const auto boxes = boxes_before_blocks(sizes, placements, mesh_shape, coordinate);
  const auto blocks = block_step(placements, mesh_shape);
  if (!blocks) {
    return boxes;
  }
  const auto local = sizes_before_blocks(sizes, placements, mesh_shape, coordinate);
  if (product(local) == 0) {
    return {};
  }
  const auto num_rows = merged_sizes(local, blocks->dims)[static_cast<size_t>(blocks->dims - 1)];
  const auto rows = chunk_run(num_rows, blocks->num_ranks, coordinate[blocks->axis]);
  return boxes_of_rows(boxes, local, blocks->dims, rows);
}

void for_each_run(
    const Box& box,
    const Block& from,
    const Block& to,
    const std::function<void(const CopyRun&)>& visit) {
  const auto num_dims = box.sizes.size();
  if (box.numel() == 0) {
    return;
  }
  // In the dims after `inner`, the box is as large as both blocks, so a run spans these dims.
  size_t inner = num_dims == 0 ? 0 : num_dims - 1;
  while (inner > 0 && box.sizes[inner] == from.sizes[inner] &&
         box.sizes[inner] == to.sizes[inner]) {
    --inner;
  }
  const auto length = product(box.sizes, inner);
  auto element = box.offsets;
  CopyRun run{index_in(from, element), index_in(to, element), length};
  while (true) {
    size_t dim = inner;
    while (dim-- > 0) { // the next row
      if (++element[dim] < box.offsets[dim] + box.sizes[dim]) {
        break;
      }
      element[dim] = box.offsets[dim];
    }
    if (dim == static_cast<size_t>(-1)) {
      break;
    }
    const CopyRun next{index_in(from, element), index_in(to, element), length};
    if (next.from == run.from + run.length && next.to == run.to + run.length) {
      run.length += length;
    } else {
      visit(run);
      run = next;
    }
  }
  visit(run);
}

} // namespace fsdp::detail
