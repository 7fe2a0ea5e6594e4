#include "layout/mesh_layout.h"

#include <gtest/gtest.h>

namespace fsdp::detail {
namespace {

using Axes = std::vector<int64_t>;
using Ranks = std::vector<int>;

TEST(MeshLayout, LastAxisRunsFastest) {
  EXPECT_EQ(grid_coordinate({2, 3, 4}, 0), (Axes{0, 0, 0}));
  EXPECT_EQ(grid_coordinate({2, 3, 4}, 5), (Axes{0, 1, 1}));
  EXPECT_EQ(grid_coordinate({2, 3, 4}, 23), (Axes{1, 2, 3}));
}

TEST(MeshLayout, RanksAlongOneAxis) {
  EXPECT_EQ(axes_ranks({2, 3, 4}, {1, 2, 3}, {0}), (Ranks{11, 23}));
  EXPECT_EQ(axes_ranks({2, 3, 4}, {1, 2, 3}, {1}), (Ranks{15, 19, 23}));
  EXPECT_EQ(axes_ranks({2, 3, 4}, {1, 2, 3}, {2}), (Ranks{20, 21, 22, 23}));
}

TEST(MeshLayout, SeveralAxesTogether) {
  EXPECT_EQ(axes_ranks({2, 2, 2}, {0, 1, 0}, {0, 2}), (Ranks{2, 3, 6, 7}));
  EXPECT_EQ(axes_size({2, 3, 4}, {0, 2}), 8);
  EXPECT_EQ(axes_index({2, 3, 4}, {1, 2, 3}, {0, 2}), 7);
}

TEST(MeshLayout, EveryRankFindsItselfInItsGroup) {
  const Axes shape{2, 3, 2, 2};
  for (int rank = 0; rank < 24; ++rank) {
    const auto coordinate = grid_coordinate(shape, rank);
    for (const auto& axes : {Axes{0}, Axes{1}, Axes{0, 1}, Axes{1, 3}, Axes{0, 1, 2, 3}}) {
      const auto ranks = axes_ranks(shape, coordinate, axes);
      EXPECT_EQ(ranks[axes_index(shape, coordinate, axes)], rank) << testing::PrintToString(axes);
    }
  }
}

} // namespace
} // namespace fsdp::detail
