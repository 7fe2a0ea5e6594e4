// Which rank owns which matrix, and what the ranks send each other.
#include "optim/matrix_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

namespace fsdp {
namespace {

using detail::MatrixBucket;
using detail::MatrixParam;

/// The buckets of all ranks of a mesh.
std::vector<std::vector<MatrixBucket>> plans(
    const std::vector<MatrixParam>& params, const std::vector<int64_t>& shape, int64_t numel) {
  const auto size = std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<>());
  std::vector<std::vector<MatrixBucket>> result;
  for (int rank = 0; rank < size; ++rank) {
    result.push_back(detail::plan_matrices(params, {shape, rank}, numel));
  }
  return result;
}

TEST(MatrixPlan, RanksHaveTheSameWorkAndWhatOneSendsTheOtherReceives) {
  std::vector<MatrixParam> params;
  for (int block = 0; block < 24; ++block) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{64, 64}, {16, 64}, {176, 64}}) {
      params.push_back({sizes, {Replicate{}, Shard{0}}});
    }
  }
  const auto all = plans(params, {2, 5}, 20000);
  std::vector<double> load(10);
  for (const auto& bucket : all[0]) {
    for (const auto& matrix : bucket.matrices) {
      load[matrix.owner] += operations(matrix);
    }
  }
  const auto most = *std::max_element(load.begin(), load.end());
  EXPECT_LE(most, 1.15 * std::accumulate(load.begin(), load.end(), 0.0) / 10);
  ASSERT_GT(all[0].size(), 1);
  for (size_t bucket = 0; bucket < all[0].size(); ++bucket) {
    int64_t sent = 0;
    int64_t returned = 0;
    int64_t numel = 0;
    for (const auto& matrix : all[0][bucket].matrices) {
      numel += matrix.box.numel();
    }
    for (size_t from = 0; from < 10; ++from) {
      for (size_t to = 0; to < 10; ++to) {
        const auto& sender = all[from][bucket];
        const auto& receiver = all[to][bucket];
        EXPECT_EQ(sender.to_owners.splits[to], receiver.from_holders.splits[from]);
        EXPECT_EQ(sender.to_holders.splits[to], receiver.from_owners.splits[from]);
        sent += sender.to_owners.splits[to];
        returned += sender.to_holders.splits[to];
        if (from / 5 != to / 5) {
          EXPECT_EQ(sender.to_owners.splits[to], 0) << "from another replica";
        }
      }
    }
    EXPECT_EQ(sent, numel); // each element once: no padding
    EXPECT_EQ(returned, 2 * numel);
  }
}

TEST(MatrixPlan, ExpertsStayWhereTheyAre) {
  for (const auto num_experts : {8, 7, 4}) {
    for (const auto& plan : plans({{{num_experts, 6, 5}, {Shard{0}}}}, {4}, 1 << 20)) {
      EXPECT_TRUE(plan[0].is_local);
    }
  }
  // One rank would have all to do.
  const auto all = plans({{{4, 6, 5}, {Replicate{}, Shard{1}}}}, {1, 4}, 1 << 20);
  EXPECT_FALSE(all[0][0].is_local);
}

} // namespace
} // namespace fsdp
