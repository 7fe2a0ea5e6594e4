#include "collective/divide_factors.h"

#include <gtest/gtest.h>

#include "support/traces.h"

namespace fsdp::detail {
namespace {

double pre(const DivideFactors& factors) {
  return factors.pre.value_or(1);
}
double post(const DivideFactors& factors) {
  return factors.post.value_or(1);
}

TEST(DivideFactors, WideDtypesDivideInTheCollective) {
  for (const auto dtype : {c10::kFloat, c10::kBFloat16}) {
    SCOPED_TRACE_OF(dtype);
    const auto alone = divide_factors({.reduce_dtype = dtype});
    EXPECT_EQ(alone.reduce_scatter_op, ReduceOp::Sum);
    EXPECT_EQ(alone.all_reduce_op, ReduceOp::Sum);
    const auto many = divide_factors({.reduce_dtype = dtype, .shard_size = 4, .replicate_size = 2});
    EXPECT_EQ(many.reduce_scatter_op, ReduceOp::Avg);
    EXPECT_EQ(many.all_reduce_op, ReduceOp::Avg);
    const auto same = divide_factors({.reduce_dtype = dtype, .shard_size = 4, .factor = 4});
    EXPECT_EQ(same.reduce_scatter_op, ReduceOp::Avg);
    EXPECT_EQ(same.all_reduce_op, ReduceOp::Sum);
    const auto other = divide_factors({.reduce_dtype = dtype, .shard_size = 4, .factor = 8});
    EXPECT_EQ(other.reduce_scatter_op, ReduceOp::premul_sum(0.125));
    EXPECT_EQ(other.all_reduce_op, ReduceOp::Sum);
    for (const auto& each : {alone, many, same, other}) {
      EXPECT_FALSE(each.pre || each.post);
    }
  }
}

TEST(DivideFactors, ForceSumDividesAfterwards) {
  const auto sum = divide_factors({.shard_size = 4, .replicate_size = 2, .force_sum = true});
  EXPECT_EQ(sum.reduce_scatter_op, ReduceOp::Sum);
  EXPECT_EQ(sum.all_reduce_op, ReduceOp::Sum);
  EXPECT_FALSE(sum.pre);
  EXPECT_EQ(sum.post, 8);
  EXPECT_EQ(divide_factors({.shard_size = 4, .factor = 3, .force_sum = true}).post, 3);
}

TEST(DivideFactors, HalfPrecisionDividesInTwoSteps) {
  struct Row {
    int64_t ranks;
    double pre, post;
  };
  for (const auto& row :
       {Row{1, 1, 1}, Row{2, 2, 1}, Row{3, 2, 1.5}, Row{4, 2, 2}, Row{6, 4, 1.5}, Row{8, 4, 2},
        Row{12, 4, 3}, Row{16, 4, 4}, Row{32, 8, 4}, Row{64, 8, 8}, Row{128, 16, 8},
        Row{256, 16, 16}}) {
    for (const bool force_sum : {false, true}) {
      SCOPED_TRACE_OF(row.ranks, force_sum);
      const auto factors = divide_factors(
          {.reduce_dtype = c10::kHalf, .shard_size = row.ranks, .force_sum = force_sum});
      EXPECT_EQ(pre(factors), row.pre);
      EXPECT_EQ(post(factors), row.post);
      EXPECT_EQ(factors.reduce_scatter_op, ReduceOp::Sum);
      EXPECT_EQ(factors.all_reduce_op, ReduceOp::Sum);
    }
  }
  const auto odd = divide_factors({.reduce_dtype = c10::kHalf, .shard_size = 4, .factor = 2.5});
  EXPECT_FALSE(odd.pre);
  EXPECT_EQ(odd.post, 2.5);
}

} // namespace
} // namespace fsdp::detail
