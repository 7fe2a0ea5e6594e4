#include "group/flat_layout.h"

#include <gtest/gtest.h>

namespace fsdp::detail {
namespace {

using c10::kBFloat16;
using c10::kByte;
using c10::kDouble;
using c10::kFloat;
using c10::kLong;

TEST(FlatLayout, OfOneDtypeIsTheShardsAsTheyLie) {
  const auto layout =
      flat_layout({{kFloat, kFloat, 5}, {kFloat, kFloat, 0}, {kFloat, kFloat, 3}}, 4);
  EXPECT_TRUE(layout.sends_shards());
  EXPECT_EQ(layout.shard_dtype, kFloat);
  EXPECT_EQ(layout.gather_dtype, kFloat);
  EXPECT_EQ(layout.shard_numel, 8);
  EXPECT_EQ(layout.gathered_numel, 8);
  ASSERT_EQ(layout.runs.size(), 1);
  EXPECT_EQ(layout.runs[0].shard.numel, 8);
  EXPECT_EQ(layout.parts[2].shard.offset, 5);
  EXPECT_EQ(layout.parts[2].unsharded_offset, 64); // 256 bytes
  EXPECT_EQ(layout.unsharded_numel % 4, 0);
}

TEST(FlatLayout, OfOneCastIsOneRun) {
  const auto layout = flat_layout({{kFloat, kBFloat16, 5}, {kFloat, kBFloat16, 3}}, 2);
  EXPECT_FALSE(layout.sends_shards());
  EXPECT_EQ(layout.shard_dtype, kFloat);
  EXPECT_EQ(layout.gather_dtype, kBFloat16);
  ASSERT_EQ(layout.runs.size(), 1);
  EXPECT_EQ(layout.runs[0].shard.numel, 8);
  EXPECT_EQ(layout.runs[0].gathered.numel, 8);
}

TEST(FlatLayout, OfSeveralDtypesIsAlignedAndBytes) {
  const std::vector<LayoutItem> items{
      {kByte, kByte, 3},
      {kFloat, kBFloat16, 5},
      {kLong, kLong, 1},
      {kDouble, kBFloat16, 2},
      {kBFloat16, kBFloat16, 7}};
  const auto layout = flat_layout(items, 2);
  EXPECT_EQ(layout.shard_dtype, kByte);
  EXPECT_EQ(layout.gather_dtype, kByte);
  EXPECT_EQ(layout.order, (std::vector<size_t>{2, 3, 1, 4, 0}));
  EXPECT_EQ(layout.gathered_numel, 8 + 2 * (2 + 5 + 7) + 3); // no gaps
  EXPECT_EQ(layout.runs.size(), 5);
  for (size_t i = 0; i < items.size(); ++i) {
    EXPECT_EQ(layout.parts[i].shard.offset % c10::elementSize(items[i].dtype), 0) << i;
    EXPECT_EQ(layout.parts[i].gathered.offset % c10::elementSize(items[i].gather_dtype), 0) << i;
    EXPECT_EQ(layout.parts[i].unsharded_offset % 256, 0) << i;
  }
}

TEST(FlatLayout, ExtendedOnesComeLastAndAreNotSentAsTheyLie) {
  const auto layout = flat_layout({{kFloat, kFloat, 5, true}, {kBFloat16, kBFloat16, 3}}, 2);
  EXPECT_FALSE(layout.sends_shards());
  EXPECT_FALSE(layout.all_plain());
  EXPECT_EQ(layout.gather_dtype, kByte);
  EXPECT_EQ(layout.order, (std::vector<size_t>{1, 0}));
  EXPECT_EQ(layout.num_plain, 1);
  EXPECT_EQ(layout.gathered_numel, 6);
  EXPECT_EQ(layout.parts[0].gathered.numel, 20); // of the whole, per rank
}

} // namespace
} // namespace fsdp::detail
