#include "layout/box.h"

#include <torch/torch.h>

#include <random>

#include "support/tensors.h"
#include "support/traces.h"

namespace fsdp::detail {
namespace {

TEST(Box, Intersection) {
  const Box a{{0, 2}, {4, 4}};
  EXPECT_EQ(intersection(a, {{3, 0}, {5, 3}}), (Box{{3, 2}, {1, 1}}));
  EXPECT_EQ(intersection(a, {{4, 0}, {5, 9}}), std::nullopt);
  EXPECT_EQ(intersection(Box{}, Box{}), Box{}); // scalars
}

TEST(Box, TilesAreExact) {
  EXPECT_TRUE(tile({{{0, 0}, {2, 3}}, {{0, 3}, {2, 1}}}, {2, 4}));
  EXPECT_TRUE(tile({{{}, {}}}, {}));
  EXPECT_TRUE(tile({}, {0, 4}));
  EXPECT_FALSE(tile({}, {}));
  EXPECT_FALSE(tile({{{0, 0}, {2, 3}}}, {2, 4})) << "a part is missing";
  EXPECT_FALSE(tile({{{0, 0}, {2, 2}}, {{0, 1}, {2, 2}}}, {2, 4})) << "overlap";
  EXPECT_FALSE(tile({{{1, 0}, {2, 4}}}, {2, 4})) << "outside";
  EXPECT_FALSE(tile({{{}, {}}, {{}, {}}}, {})) << "twice";
  EXPECT_FALSE(tile({{{0}, {4}}}, {2, 2})) << "another number of dims";
}

TEST(Box, TilesAreFoundAsByCountingElements) {
  std::mt19937 random(3);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint32_t>(n));
  };
  int good = 0;
  for (int round = 0; round < 3000; ++round) {
    const std::vector<int64_t> sizes{2 + below(3), 2 + below(3), 2 + below(3)};
    std::vector<Box> boxes{Box::whole(sizes)};
    for (int i = 0; i < 3; ++i) { // cut a box in two
      auto& first = boxes[static_cast<size_t>(below(static_cast<int64_t>(boxes.size())))];
      const auto dim = static_cast<size_t>(below(3));
      auto second = first;
      const auto at = below(first.sizes[dim] + 1);
      first.sizes[dim] = at;
      second.offsets[dim] += at;
      second.sizes[dim] -= at;
      boxes.push_back(second);
    }
    if (round % 2 == 1) { // and move one
      auto& box = boxes[static_cast<size_t>(below(4))];
      const auto dim = static_cast<size_t>(below(3));
      box.offsets[dim] = below(sizes[dim] - box.sizes[dim] + 1);
    }
    auto counts = torch::zeros(sizes, torch::kLong);
    for (const auto& box : boxes) {
      auto part = counts;
      for (size_t dim = 0; dim < 3; ++dim) {
        part = part.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
      }
      part += 1;
    }
    const bool expected = counts.eq(1).all().item<bool>();
    EXPECT_EQ(tile(boxes, sizes), expected);
    good += expected;
  }
  EXPECT_GT(good, 1500);
  EXPECT_LT(good, 2900);
}

TEST(Box, StridedShardsHaveSeveral) {
  // Chunks 0..5 and 6..11 are each divided over two ranks.
  const auto boxes = local_boxes({12, 2}, {StridedShard{0, 2}}, {2}, {1});
  EXPECT_EQ(boxes, (std::vector<LocalBox>{{{{3, 0}, {3, 2}}, {0, 0}}, {{{9, 0}, {3, 2}}, {3, 0}}}));
  // Where a later axis accounts for it, there is one.
  EXPECT_EQ(local_boxes({12}, {StridedShard{0, 2}, Shard{0}}, {2, 2}, {1, 0}).size(), 1u);
  EXPECT_TRUE(local_boxes({1}, {Shard{0}}, {2}, {1}).empty());
}

std::vector<CopyRun> runs_of(const Box& box, const Block& from, const Block& to) {
  std::vector<CopyRun> runs;
  for_each_run(box, from, to, [&](const CopyRun& run) { runs.push_back(run); });
  return runs;
}

TEST(Box, RunsAreAsLongAsCanBe) {
  const Block whole{{0, 0}, {4, 6}};
  EXPECT_EQ(runs_of({{1, 0}, {2, 6}}, whole, {{1, 0}, {2, 6}}), (std::vector<CopyRun>{{6, 0, 12}}));
  EXPECT_EQ(
      runs_of({{1, 2}, {2, 3}}, whole, {{1, 2}, {2, 3}}),
      (std::vector<CopyRun>{{8, 0, 3}, {14, 3, 3}}));
  EXPECT_EQ(runs_of({{}, {}}, {{}, {}}, {{}, {}}), (std::vector<CopyRun>{{0, 0, 1}}));
  EXPECT_TRUE(runs_of({{0, 0}, {0, 6}}, whole, whole).empty());
}

TEST(Box, RunsCopyTheBox) {
  const auto full = torch::arange(4 * 5 * 6).view({4, 5, 6});
  const std::vector<Box> boxes{
      {{1, 2, 3}, {2, 2, 2}}, {{0, 1, 0}, {3, 3, 6}}, {{2, 0, 0}, {1, 5, 6}}};
  for (const auto& box : boxes) {
    SCOPED_TRACE_OF(box.offsets, box.sizes);
    auto copy = torch::zeros(box.sizes, torch::kLong);
    for_each_run(box, {{0, 0, 0}, {4, 5, 6}}, {box.offsets, box.sizes}, [&](const CopyRun& run) {
      copy.view(-1)
          .narrow(0, run.to, run.length)
          .copy_(full.view(-1).narrow(0, run.from, run.length));
    });
    auto expected = full;
    for (int64_t dim = 0; dim < 3; ++dim) {
      expected = expected.narrow(dim, box.offsets[dim], box.sizes[dim]);
    }
    EXPECT_SAME(copy, expected.contiguous());
  }
}

} // namespace
} // namespace fsdp::detail
