// Ranks as threads that share one GPU.
#include <fsdp/distributed.h>
#include <torch/torch.h>

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

INSTANTIATE_TEST_SUITE_P(
    WorldSizes, ThreadsOnGpu, testing::Values(1, 2, 4, 8), testing::PrintToStringParamName());

} // namespace
} // namespace fsdp
