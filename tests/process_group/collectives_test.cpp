// Every collective against its definition, at every world size, on threads.
#include <torch/torch.h>

#include <fsdp/distributed.h>

#include "process_group/exchange.h"
#include "support/collective_checks.h"

namespace fsdp {
namespace {

using test::brought;
using test::sum_of_all;

class Collectives : public testing::TestWithParam<int> {};

TEST_P(Collectives, MatchTheirDefinitions) {
  const int n = GetParam();
  run_ranks(n, [&](int rank) {
    const auto world = default_group();
    EXPECT_EQ(world.rank(), rank);
    EXPECT_EQ(world.size(), n);
    EXPECT_EQ(world.backend_name(), "threads");
    test::check_every_collective(world, 5);
    test::check_every_collective(world, 0);
    if (n <= 8) {
      test::check_every_collective(world, 70'000); // more than a block
    }
  });
}

TEST_P(Collectives, WorkInSubGroups) {
  const int n = GetParam();
  run_ranks(n, [&](int rank) {
    // Even and odd ranks, the odd ones in reverse order.
    std::vector<int> ranks;
    for (int r = rank % 2; r < n; r += 2) {
      ranks.push_back(r);
    }
    if (rank % 2) {
      std::reverse(ranks.begin(), ranks.end());
    }
    const auto group = default_group().new_group(ranks);
    EXPECT_EQ(group.ranks(), ranks);
    EXPECT_EQ(ranks[group.rank()], rank);
    test::check_every_collective(group, 3);
    EXPECT_EQ(default_group().new_group(ranks), group); // shared
    const auto other = default_group().new_group(ranks, "other");
    EXPECT_FALSE(other == group);
    test::check_every_collective(other, 2);
    // A group of a group counts in that group's ranks.
    const auto alone = group.new_group({group.rank()});
    EXPECT_EQ(alone.ranks(), std::vector<int>{rank});
    test::check_every_collective(alone, 2);
  });
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizes,
    Collectives,
    testing::Values(1, 2, 3, 4, 8, 128),
    testing::PrintToStringParamName());

// Reference: one accumulation over the ranks in order, in fp32 for narrow types.
class Dtypes : public testing::TestWithParam<torch::ScalarType> {};

TEST_P(Dtypes, ReduceInEveryWayThatTorchDoes) {
  const auto type = GetParam();
  run_ranks(3, [&](int rank) {
    const auto world = default_group();
    const auto reduce = [&](ReduceOp op) {
      auto tensor = brought(rank, 7, type);
      world.all_reduce(tensor, op);
      auto part = torch::zeros({7}, type);
      auto parts = brought(rank, 7, type).repeat({3}).contiguous();
      world.reduce_scatter(part, parts, op);
      EXPECT_SAME(part, tensor); // both in the same order
      return tensor;
    };
    EXPECT_SAME(reduce(ReduceOp::Sum), sum_of_all(3, 7, type));
    if (type != torch::kBool) {
      EXPECT_SAME(reduce(ReduceOp::Avg), (sum_of_all(3, 7, torch::kDouble) / 3).to(type));
    }
    if (!torch::isComplexType(type)) {
      EXPECT_SAME(reduce(ReduceOp::Max), brought(2, 7, type));
      EXPECT_SAME(reduce(ReduceOp::Min), brought(0, 7, type));
    }
    auto product = brought(0, 7, torch::kDouble) * brought(1, 7, torch::kDouble) *
                   brought(2, 7, torch::kDouble);
    EXPECT_SAME(reduce(ReduceOp::Product), product.to(type));
    if (torch::isFloatingType(type) || torch::isComplexType(type)) {
      EXPECT_SAME(
          reduce(ReduceOp::premul_sum(0.5)), (sum_of_all(3, 7, torch::kDouble) * 0.5).to(type));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    Dtypes,
    testing::Values(
        torch::kUInt8,
        torch::kInt8,
        torch::kInt16,
        torch::kInt32,
        torch::kInt64,
        torch::kFloat16,
        torch::kBFloat16,
        torch::kFloat32,
        torch::kFloat64,
        torch::kComplexFloat,
        torch::kComplexDouble,
        torch::kBool,
        torch::kFloat8_e4m3fn,
        torch::kFloat8_e5m2),
    [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(Collectives, ReduceInRankOrderWithTheSameBitsEveryTime) {
  constexpr int kRanks = 8;
  std::vector<torch::Tensor> inputs;
  torch::manual_seed(3);
  for (int rank = 0; rank < kRanks; ++rank) {
    inputs.push_back(torch::randn({100'003}) * std::pow(10.0, rank - 4));
  }
  auto expected = inputs[0].clone();
  for (int rank = 1; rank < kRanks; ++rank) {
    expected += inputs[rank];
  }
  for (int repeat = 0; repeat < 10; ++repeat) {
    run_ranks(kRanks, [&](int rank) {
      auto tensor = inputs[rank].clone();
      default_group().all_reduce(tensor);
      EXPECT_SAME(tensor, expected);
    });
  }
}

TEST(Collectives, AccumulateHalfPrecisionInFloat) {
  run_ranks(4, [](int rank) {
    // 2048 + 1 is not a half; the sum of all is.
    auto tensor = torch::full({1}, rank == 0 ? 2048.0 : 1.0, torch::kHalf);
    default_group().all_reduce(tensor);
    EXPECT_EQ(tensor.item<float>(), 2052.0f - 0.0f); // 2051 rounds to even
  });
}

TEST(Collectives, MayShareMemoryBetweenInputAndOutput) {
  run_ranks(3, [](int rank) {
    const auto world = default_group();
    auto out = torch::zeros({12});
    auto in = out.narrow(0, rank * 4, 4);
    in.copy_(brought(rank, 4));
    world.all_gather(out, in);
    for (int r = 0; r < 3; ++r) {
      EXPECT_SAME(out.narrow(0, r * 4, 4), brought(r, 4));
    }
    auto parts = brought(rank, 12);
    world.reduce_scatter(parts.narrow(0, rank * 4, 4), parts);
    EXPECT_SAME(parts.narrow(0, rank * 4, 4), sum_of_all(3, 12).narrow(0, rank * 4, 4));
  });
}

TEST(Collectives, AreInvisibleToAutograd) {
  run_ranks(2, [](int rank) {
    auto leaf = torch::full({2}, rank + 1.0, torch::requires_grad());
    default_group().all_reduce(leaf);
    EXPECT_SAME(leaf.detach(), torch::full({2}, 3.0));
    c10::InferenceMode inference;
    auto tensor = torch::full({2}, rank + 1.0);
    default_group().all_reduce(tensor);
    EXPECT_SAME(tensor, torch::full({2}, 3.0));
  });
}

TEST(Collectives, NeedPeersToArriveButNotToWait) {
  run_ranks(2, [](int rank) {
    const auto a = default_group();
    const auto b = a.new_group({0, 1}, "b");
    auto x = torch::full({3}, rank + 1.0);
    auto y = torch::full({3}, rank + 10.0);
    auto on_a = a.all_reduce_async(x);
    auto on_b = b.all_reduce_async(y);
    // The ranks wait in opposite orders, with a barrier in between.
    (rank == 0 ? on_a : on_b).wait();
    a.barrier();
    (rank == 0 ? on_b : on_a).wait();
    EXPECT_SAME(x, torch::full({3}, 3.0));
    EXPECT_SAME(y, torch::full({3}, 21.0));
  });
}

/// Short ones take one collective, others a second.
TEST(Collectives, TextsOfAnyLength) {
  const auto text_of = [](int rank, size_t length) {
    return std::string(length, static_cast<char>('a' + rank));
  };
  run_ranks(3, [&](int rank) {
    for (const size_t most : {0, 1, 503, 504, 505, 512, 100'000}) {
      for (const int longest : {0, 2}) {
        SCOPED_TRACE_OF(most, longest);
        const auto length = [&](int r) { return r == longest ? most : most / 2; };
        const auto texts = gather_texts(text_of(rank, length(rank)));
        ASSERT_EQ(texts.size(), 3);
        for (int r = 0; r < 3; ++r) {
          EXPECT_EQ(texts[static_cast<size_t>(r)], text_of(r, length(r)));
        }
      }
    }
    const std::string zeros("a\0b\0", 4);
    EXPECT_EQ(gather_texts(zeros), std::vector<std::string>(3, zeros));
  });
}

TEST(Collectives, ServeAsAC10dBackendToo) {
  run_ranks(2, [](int rank) {
    auto backend = default_group().backend();
    std::vector<torch::Tensor> tensors{torch::full({2}, rank + 1.0)};
    backend->allreduce(tensors, {})->wait();
    EXPECT_SAME(tensors[0], torch::full({2}, 3.0));
    std::vector<std::vector<torch::Tensor>> parts;
    if (rank == 0) {
      parts = {{torch::full({2}, 5.0), torch::full({2}, 6.0)}};
    }
    backend->scatter(tensors, parts, {})->wait();
    EXPECT_SAME(tensors[0], torch::full({2}, 5.0 + rank));
  });
}

} // namespace
} // namespace fsdp
