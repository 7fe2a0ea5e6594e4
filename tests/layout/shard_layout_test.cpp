#include "layout/shard_layout.h"

#include <torch/torch.h>

#include "layout/mesh_layout.h"
#include "support/tensors.h"

namespace fsdp::detail {
namespace {

using Placements = std::vector<Placement>;
using Sizes = std::vector<int64_t>;

std::vector<int64_t> elements(const std::vector<Run>& runs) {
  std::vector<int64_t> result;
  for (const auto& run : runs) {
    for (int64_t i = 0; i < run.length; ++i) {
      result.push_back(run.offset + i);
    }
  }
  return result;
}

std::vector<int64_t> held(
    int64_t size, const Placements& placements, const Sizes& mesh, const Sizes& coordinate) {
  return elements(local_runs(size, shard_steps(placements, mesh, 0), coordinate));
}

TEST(ShardLayout, ChunksExactlyAsTorch) {
  for (int64_t size = 0; size <= 20; ++size) {
    for (int64_t count = 1; count <= 9; ++count) {
      const auto chunks = torch::arange(size).chunk(count);
      for (int64_t index = 0; index < count; ++index) {
        SCOPED_TRACE_OF(size, count, index);
        const auto run = chunk_run(size, count, index);
        const auto expected = index < static_cast<int64_t>(chunks.size())
                                  ? chunks[index]
                                  : torch::empty({0}, torch::kLong);
        EXPECT_SAME(torch::arange(run.offset, run.offset + run.length), expected);
      }
    }
  }
}

TEST(ShardLayout, PlainShardsDivideInMeshOrder) {
  const Placements placements{Shard{0}, Shard{0}};
  EXPECT_EQ(held(8, placements, {2, 2}, {0, 1}), (Sizes{2, 3}));
  EXPECT_EQ(held(8, placements, {2, 2}, {1, 0}), (Sizes{4, 5}));
}

TEST(ShardLayout, StridedShardDividesAfterTheLaterAxis) {
  const Placements placements{StridedShard{0, 2}, Shard{0}};
  EXPECT_EQ(held(8, placements, {2, 2}, {0, 1}), (Sizes{4, 5}));
  EXPECT_EQ(held(8, placements, {2, 2}, {1, 0}), (Sizes{2, 3}));
  // Tensor parallel holds 0-3 and 4-6; FSDP divides each into three.
  EXPECT_EQ(held(7, placements, {3, 2}, {0, 0}), (Sizes{0, 1}));
  EXPECT_EQ(held(7, placements, {3, 2}, {1, 0}), (Sizes{2, 3}));
  EXPECT_EQ(held(7, placements, {3, 2}, {2, 0}), (Sizes{}));
  EXPECT_EQ(held(7, placements, {3, 2}, {2, 1}), (Sizes{6}));
}

TEST(ShardLayout, StridedShardMayComeAfterSomeOfTheLaterAxes) {
  // Axis 1 divides first, then axis 0, then axis 2.
  const auto steps = shard_steps({StridedShard{0, 2}, Shard{0}, Shard{0}}, {3, 2, 5}, 0);
  EXPECT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0].axis, 1);
  EXPECT_EQ(steps[1].axis, 0);
  EXPECT_EQ(steps[2].axis, 2);
}

TEST(ShardLayout, StridedShardAloneTakesFromEveryChunk) {
  EXPECT_EQ(held(8, {StridedShard{0, 2}}, {2}, {0}), (Sizes{0, 1, 4, 5}));
  EXPECT_EQ(held(8, {StridedShard{0, 2}}, {2}, {1}), (Sizes{2, 3, 6, 7}));
  EXPECT_EQ(held(5, {StridedShard{0, 2}}, {2}, {0}), (Sizes{0, 1, 3}));
}

// Whatever the placements, the ranks that differ only on sharding axes hold
// every element exactly once.
TEST(ShardLayout, EveryElementIsHeldOnce) {
  const std::vector<Placements> all{
      {Shard{0}, Shard{0}},
      {StridedShard{0, 3}, Shard{0}},
      {StridedShard{0, 4}, Shard{0}}, // no axis of 4 ranks
      {StridedShard{0, 2}, StridedShard{0, 5}},
      {Shard{0}, StridedShard{0, 2}}};
  for (const auto& placements : all) {
    for (int64_t size = 0; size < 30; ++size) {
      SCOPED_TRACE(c10::str(to_string(placements), " of ", size));
      std::multiset<int64_t> seen;
      for (int rank = 0; rank < 6; ++rank) {
        const auto coordinate = grid_coordinate({2, 3}, rank);
        const auto steps = shard_steps(placements, {2, 3}, 0);
        const auto mine = elements(local_runs(size, steps, coordinate));
        EXPECT_EQ(static_cast<int64_t>(mine.size()), local_length(size, steps, coordinate));
        seen.insert(mine.begin(), mine.end());
      }
      EXPECT_EQ(static_cast<int64_t>(seen.size()), size);
      EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), seen.size());
    }
  }
}

TEST(ShardLayout, LocalSizes) {
  EXPECT_EQ(local_sizes({5, 7}, {Shard{1}, Shard{0}}, {2, 3}, {1, 2}), (Sizes{1, 3}));
  EXPECT_EQ(local_sizes({5, 7}, {Replicate{}, Partial{}}, {2, 3}, {1, 2}), (Sizes{5, 7}));
  EXPECT_EQ(local_sizes({2}, {Shard{0}}, {4}, {3}), (Sizes{0}));
}

TEST(ShardLayout, NormalizesAndRefuses) {
  EXPECT_EQ(normalized({Shard{-1}}, 3, 1), (Placements{Shard{2}}));
  EXPECT_THROW(normalized({Shard{3}}, 3, 1), c10::ValueError);
  EXPECT_THROW(normalized({Shard{0}}, 0, 1), c10::ValueError);
  EXPECT_THROW(normalized({Shard{0}}, 1, 2), c10::ValueError);
  EXPECT_THROW(normalized({StridedShard{0, 0}}, 1, 1), c10::ValueError);
}

TEST(Placement, Names) {
  EXPECT_EQ(
      to_string(Placements{Replicate{}, Shard{1}, StridedShard{0, 2}, Partial{}}),
      "(R, S(1), _S(0, 2), P(sum))");
}

} // namespace
} // namespace fsdp::detail
