// Ranks as threads that share one GPU.
#include <fsdp/distributed.h>
#include <torch/torch.h>

#include "process_group/fake/fake_backend.h"
#include "support/collective_checks.h"
#include "support/gpu.h"

namespace fsdp {
namespace {

using test::gpu;
using test::OwnStream;

class ThreadsOnGpu : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) {
      GTEST_SKIP() << "no GPU";
    }
  }
};

TEST_P(ThreadsOnGpu, MatchTheDefinitions) {
  run_ranks(GetParam(), [](int) {
    test::check_every_collective(default_group(), 5, gpu()); // all on the default stream
    const OwnStream own;
    test::check_every_collective(default_group(), 0, gpu());
    test::check_every_collective(default_group(), 70'000, gpu());
  });
}

TEST_P(ThreadsOnGpu, OrderWorkOnStreamsWithoutWaitingForThem) {
  const int n = GetParam();
  run_ranks(n, [&](int rank) {
    const OwnStream own;
    const auto world = default_group();
    for (int step = 0; step < 50; ++step) {
      // The input is still being computed when the collective is called, and
      // its memory is used again right after.
      auto slow = torch::full({1 << 20}, 1.0, gpu());
      for (int i = 0; i < (rank + step) % n * 20; ++i) {
        slow.mul_(1.0);
      }
      auto gathered = torch::empty({n, 1 << 20}, gpu());
      world.all_gather(gathered, slow.add_(rank + step));
      slow.fill_(-1);
      slow = torch::Tensor();
      auto reused = torch::full({1 << 20}, -2.0, gpu());
      const auto expected = torch::arange(n, gpu()).add_(1 + step).view({n, 1}).to(torch::kFloat);
      EXPECT_TRUE((gathered == expected).all().item<bool>()) << "rank " << rank << " step " << step;
    }
  });
}

// By threads and, as if all had sent the same, by a fake group: aligned or not, with padding.
TEST_P(ThreadsOnGpu, PutPartsWhereTheyBelong) {
  const int n = GetParam();
  run_ranks(n, [&](int rank) {
    const OwnStream own;
    for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kByte}) {
      for (const int64_t numel : {1, 3, 64, 4096}) {
        SCOPED_TRACE_OF(dtype, numel);
        // The last rank's last element is padding.
        const auto plan = std::make_shared<detail::GatherPlan>(detail::GatherPlan{
            .parts =
                {{.in = 0, .out = 0, .numel = numel, .unpadded_numel = n * numel - 1},
                 {.in = numel, .out = n * numel + 256, .numel = 8, .unpadded_numel = n * 8}},
            .ranks = n,
            .in_numel = numel + 8,
            .out_numel = n * (numel + 8) + 256});
        const auto sent = torch::arange(numel + 8, torch::device(gpu())).remainder_(31).to(dtype);
        const auto check = [&](const ProcessGroup& group, bool same) {
          const auto in = same ? sent : sent + rank;
          const auto out = torch::full({plan->out_numel}, 99, sent.options());
          const auto version = out._version();
          detail::all_gather_placed_async(group, out, in, plan).wait();
          EXPECT_EQ(out._version(), version);
          for (int from = 0; from < n; ++from) {
            const auto expected = same ? sent : sent + from;
            const auto length = from + 1 == n ? numel - 1 : numel;
            EXPECT_TRUE(out.narrow(0, from * numel, length).equal(expected.narrow(0, 0, length)));
            EXPECT_TRUE(
                out.narrow(0, n * numel + 256 + from * 8, 8).equal(expected.narrow(0, numel, 8)));
          }
          EXPECT_TRUE((out.narrow(0, n * numel, 256) == 99).all().item<bool>()); // between them
        };
        check(default_group(), /*same=*/false);
        check(
            ProcessGroup(c10::make_intrusive<detail::FakeBackend>(rank, n), "fake"), /*same=*/true);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizes, ThreadsOnGpu, testing::Values(1, 2, 4, 8), testing::PrintToStringParamName());

} // namespace
} // namespace fsdp
