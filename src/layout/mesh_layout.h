#pragma once

#include <cstdint>
#include <vector>

namespace fsdp::detail {

// Integer arithmetic for meshes, without state and communication. An axis of a mesh is a list of
// axes of the root grid; a flattened axis has several.

/// Returns the coordinate of `rank` in a grid of this shape. The last axis varies fastest.
std::vector<int64_t> grid_coordinate(const std::vector<int64_t>& shape, int64_t rank);
/// The inverse: the number of this coordinate.
int64_t grid_index(const std::vector<int64_t>& shape, const std::vector<int64_t>& coordinate);

/// Return the number of positions along all `root_axes`, and the index of `coordinate` among them.
int64_t axes_size(const std::vector<int64_t>& shape, const std::vector<int64_t>& root_axes);
int64_t axes_index(
    const std::vector<int64_t>& shape,
    const std::vector<int64_t>& coordinate,
    const std::vector<int64_t>& root_axes);

/// Returns the ranks whose coordinates equal `coordinate` on all other axes, in grid order of
/// `root_axes`.
std::vector<int> axes_ranks(
    const std::vector<int64_t>& shape,
    std::vector<int64_t> coordinate,
    const std::vector<int64_t>& root_axes);

} // namespace fsdp::detail
