#pragma once

#include <cstdint>
#include <vector>

namespace fsdp::detail {

// Integer arithmetic of meshes: no ranks' state, no communication. A mesh's
// axis is a list of axes of the root grid, several of them after `flatten`.

/// Place of `rank` in a grid whose last axis runs fastest.
std::vector<int64_t> grid_coordinate(const std::vector<int64_t>& shape, int64_t rank);

/// Number of places along the root axes together, and the index of
/// `coordinate` among them.
int64_t axes_size(const std::vector<int64_t>& shape, const std::vector<int64_t>& root_axes);
int64_t axes_index(
    const std::vector<int64_t>& shape,
    const std::vector<int64_t>& coordinate,
    const std::vector<int64_t>& root_axes);

/// The ranks that agree with `coordinate` on all other axes, in grid order of
/// `root_axes`.
std::vector<int> axes_ranks(
    const std::vector<int64_t>& shape,
    std::vector<int64_t> coordinate,
    const std::vector<int64_t>& root_axes);

} // namespace fsdp::detail
