#include "layout/mesh_layout.h"

namespace fsdp::detail {

std::vector<int64_t> grid_coordinate(const std::vector<int64_t>& shape, int64_t rank) {
  std::vector<int64_t> coordinate(shape.size());
  for (size_t axis = shape.size(); axis-- > 0;) {
    coordinate[axis] = rank % shape[axis];
    rank /= shape[axis];
  }
  return coordinate;
}

int64_t grid_index(const std::vector<int64_t>& shape, const std::vector<int64_t>& coordinate) {
  int64_t index = 0;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    index = index * shape[axis] + coordinate[axis];
  }
  return index;
}

int64_t axes_size(const std::vector<int64_t>& shape, const std::vector<int64_t>& root_axes) {
  int64_t size = 1;
  for (const auto axis : root_axes) {
    size *= shape[axis];
  }
  return size;
}

int64_t axes_index(
    const std::vector<int64_t>& shape,
    const std::vector<int64_t>& coordinate,
    const std::vector<int64_t>& root_axes) {
  int64_t index = 0;
  for (const auto axis : root_axes) {
    index = index * shape[axis] + coordinate[axis];
  }
  return index;
}

std::vector<int> axes_ranks(
    const std::vector<int64_t>& shape,
    std::vector<int64_t> coordinate,
    const std::vector<int64_t>& root_axes) {
  std::vector<int64_t> all_axes;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    all_axes.push_back(static_cast<int64_t>(axis));
  }
  std::vector<int> ranks;
  const auto count = axes_size(shape, root_axes);
  for (int64_t index = 0; index < count; ++index) {
    auto rest = index;
    for (size_t i = root_axes.size(); i-- > 0;) {
      coordinate[root_axes[i]] = rest % shape[root_axes[i]];
      rest /= shape[root_axes[i]];
    }
    ranks.push_back(static_cast<int>(axes_index(shape, coordinate, all_axes)));
  }
  return ranks;
}

} // namespace fsdp::detail
