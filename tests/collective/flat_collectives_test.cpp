// Copy-in, gather, copy-out; and the way back.
#include <fsdp/debug.h>
#include <fsdp/distributed.h>
#include <torch/torch.h>

#include "collective/comm.h"
#include "collective/gather.h"
#include "collective/reduce.h"
#include "support/tensors.h"

namespace fsdp::detail {
namespace {

TEST(Gather, MakesEachPartContiguous) {
  run_ranks(3, [](int rank) {
    const auto shard = torch::arange(3.0) + 10 * rank;
    auto gathered = start_gather(*default_all_gather(), shard, default_group(), {});
    gathered.wait({});
    auto a = torch::zeros({3, 2});
    auto b = torch::zeros({3, 1});
    const auto version = a._version();
    copy_out(gathered.buffer, {2, 1}, 3, {a, b});
    EXPECT_SAME(a, torch::tensor({{0.f, 1.f}, {10.f, 11.f}, {20.f, 21.f}}));
    EXPECT_SAME(b, torch::tensor({{2.f}, {12.f}, {22.f}}));
    EXPECT_EQ(a._version(), version);
  });
}

TEST(Gather, PutsPartsWhereTheyBelong) {
  run_ranks(3, [](int rank) {
    const auto shard = torch::arange(4.0) + 10 * rank;
    // Two elements of each rank at 0, of which the last is padding; one at 8; one at 11 that
    // only the first rank has.
    const auto plan = std::make_shared<GatherPlan>(GatherPlan{
        .parts =
            {{.in = 0, .out = 0, .numel = 2, .unpadded_numel = 5},
             {.in = 2, .out = 8, .numel = 1, .unpadded_numel = 3},
             {.in = 3, .out = 11, .numel = 1, .unpadded_numel = 1}},
        .ranks = 3,
        .in_numel = 4,
        .out_numel = 12});
    const auto expect_placed = [](const torch::Tensor& whole) {
      EXPECT_SAME(whole.narrow(0, 0, 5), torch::tensor({0.f, 1.f, 10.f, 11.f, 20.f}));
      EXPECT_SAME(whole.narrow(0, 8, 3), torch::tensor({2.f, 12.f, 22.f}));
      EXPECT_EQ(whole[11].item<float>(), 3);
    };
    ASSERT_TRUE(places_gathers(default_group(), *plan, torch::kCPU));
    CommDebugMode comm;
    auto placed = start_placed_gather(shard, default_group(), plan);
    placed.wait({});
    expect_placed(placed.buffer);
    EXPECT_EQ(comm.count("all_gather"), 1);
    EXPECT_EQ(comm.bytes("all_gather"), 12 * 4); // of all inputs
    // The same from what another transport leaves.
    auto gathered = start_gather(*default_all_gather(), shard, default_group(), {});
    gathered.wait({});
    const auto whole = torch::zeros({12});
    const auto version = whole._version();
    copy_out(gathered.buffer, *plan, whole);
    expect_placed(whole);
    EXPECT_EQ(whole[5].item<float>(), 0);
    EXPECT_EQ(whole._version(), version);
  });
}

TEST(Gather, OfAFakeGroupRepeatsTheShard) {
  for (const int64_t ranks : {2, 3, 5, 8}) {
    SCOPED_TRACE_OF(ranks);
    const GatherPlan plan{
        .parts = {{.in = 1, .out = 0, .numel = 2, .unpadded_numel = 2 * ranks - 1}},
        .ranks = ranks,
        .in_numel = 3,
        .out_numel = 16};
    const auto whole = torch::zeros({16});
    place_repeated(whole, torch::arange(3.0).to(torch::kFloat), plan);
    auto expected = torch::zeros({16});
    expected.narrow(0, 0, 2 * ranks) = torch::tensor({1.f, 2.f}).repeat(ranks);
    expected[2 * ranks - 1] = 0;
    EXPECT_SAME(whole, expected);
  }
}

// The worked example: a (5, 3) and a (7) over four ranks.
TEST(Reduce, LaysRowsOutByRankAndPadsWithZeros) {
  run_ranks(4, [](int rank) {
    std::vector<ReduceInput> inputs{
        {torch::arange(15.0).view({5, 3})}, {torch::arange(100.0, 107.0).to(torch::kFloat)}};
    const ReduceRequest request{
        .group = default_group(), .factors = divide_factors({.shard_size = 4, .factor = 4})};
    auto reducing = start_reduce(*default_reduce_scatter(), inputs, request);
    EXPECT_TRUE(inputs.empty()); // the gradients are let go of
    const auto expected = torch::tensor(
        {{0.f, 1.f, 2.f, 3.f, 4.f, 5.f, 100.f, 101.f},
         {6.f, 7.f, 8.f, 9.f, 10.f, 11.f, 102.f, 103.f},
         {12.f, 13.f, 14.f, 0.f, 0.f, 0.f, 104.f, 105.f},
         {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 106.f, 0.f}});
    EXPECT_SAME(reducing.input.view({4, 8}), expected);
    EXPECT_SAME(finish_reduce(reducing, request), expected[rank]); // all ranks brought the same
  });
}

TEST(Reduce, LaysOutAsTorchDoes) {
  for (const int ranks : {1, 2, 5, 7}) {
    run_ranks(ranks, [&](int) {
      for (const auto& sizes : std::vector<std::vector<int64_t>>{
               {9}, {1}, {14, 7}, {1, 2, 3, 4, 5, 6, 7, 8, 23}, {40000, 3}}) {
        SCOPED_TRACE_OF(sizes);
        std::vector<at::Tensor> grads;
        std::vector<ReduceInput> inputs;
        for (const auto rows : sizes) {
          grads.push_back(torch::randn({rows, 3}));
          inputs.push_back({grads.back()});
        }
        const ReduceRequest request{.group = default_group(), .factors = divide_factors({})};
        auto reducing = start_reduce(*default_reduce_scatter(), inputs, request);
        EXPECT_SAME(reducing.input.view({ranks, -1}), at::_chunk_cat(grads, /*dim=*/0, ranks));
        reducing.work.wait();
      }
    });
  }
}

TEST(Reduce, CastsDividesAndTakesAnyDim) {
  run_ranks(2, [](int rank) {
    const auto grad = torch::tensor({{1, 2, 3, 4}, {5, 6, 7, 8}}).to(torch::kBFloat16) * (rank + 1);
    for (const auto reduce_dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
      SCOPED_TRACE_OF(reduce_dtype);
      std::vector<ReduceInput> inputs{{grad, 1}};
      const ReduceRequest request{
          .group = default_group(),
          .reduce_dtype = reduce_dtype,
          .factors = divide_factors({.reduce_dtype = reduce_dtype, .shard_size = 2})};
      auto reducing = start_reduce(*default_reduce_scatter(), inputs, request);
      const auto mine = grad.to(torch::kFloat).div(rank + 1).mul(1.5).chunk(2, 1)[rank];
      EXPECT_SAME(finish_reduce(reducing, request), mine.reshape({-1}).to(reduce_dtype));
    }
  });
}

TEST(Reduce, OfParametersThatNeedNoPaddingOrAllPadding) {
  run_ranks(4, [](int rank) {
    std::vector<ReduceInput> inputs{
        {torch::ones({1, 2})}, {torch::ones({0, 2})}, {torch::ones({4})}};
    const ReduceRequest request{
        .group = default_group(), .factors = divide_factors({.shard_size = 4})};
    auto reducing = start_reduce(*default_reduce_scatter(), inputs, request);
    const float first = rank == 0 ? 1.f : 0.f;
    EXPECT_SAME(finish_reduce(reducing, request), torch::tensor({first, first, 1.f}));
  });
}

} // namespace
} // namespace fsdp::detail
