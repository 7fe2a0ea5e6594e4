// How much of a GPU's memory training may use: FSDP2's own bounds, by the
// caching allocator's numbers. One rank of a fake world of two, so that they
// are one rank's.
#include <fsdp/optim.h>

#include "module/memory_model.h"
#include "support/gpu.h"

namespace fsdp {
namespace {

using namespace test;

class MemoryOnGpu : public testing::TestWithParam<MemoryCase> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    joined.emplace(InitOptions{.backend = "fake", .rank = 0, .world_size = 2});
    // The workspaces of matrix products stay.
    auto warm = torch::nn::Linear(kDim, kDim);
    warm->to(torch::kCUDA);
    warm(torch::randn({2, kDim}, gpu())).sum().backward();
    torch::cuda::synchronize();
  }
  std::optional<ScopedProcessGroup> joined;
};

void expect_bounds(const MemoryCase& which, bool placed) {
  const auto& [name, reshard, offload, optimizer_in_backward] = which;
  const MemoryUsage usage(gpu());
  auto net = seeded<Transformer>(kMemoryArgs);
  EXPECT_EQ(usage.now(), 0); // on the host
  FullyShardOptions options{
      .mesh = init_device_mesh(torch::kCUDA, {2}), .reshard_after_forward = reshard};
  if (offload) {
    options.offload_policy = CPUOffloadPolicy{};
  }
  shard_transformer(net, options);
  // Block by block it goes to the GPU whole, and half of it stays.
  EXPECT_LE(
      usage.peak(), offload ? bytes(3 * kBlock / 2) + 4 * kMB : bytes(kShard + kBlock) + 4 * kMB);
  EXPECT_LE(usage.now(), offload ? kMB : bytes(kShard) + 4 * kMB);

  const auto optimizers = make_optimizers(*net, optimizer_in_backward);

  const auto tokens = random_tokens(0, {1, 4}, kMemoryArgs.vocab_size).cuda();
  const int64_t shard = offload ? 0 : kShard;
  usage.reset_peak();
  auto loss = net(tokens).sum();
  // The parameters of a group, what was gathered, and what is being gathered for the next
  // one; where gathers are placed, the first two are one.
  const auto blocks = (placed && !offload ? 2 : 3) * kBlock;
  const auto in_forward = reshard ? blocks + kRest + shard : shard + kWhole + kBlock;
  const auto forward_peak = usage.peak();
  EXPECT_TRUE(within(forward_peak, bytes(in_forward) + kAllowance));

  usage.reset_peak();
  loss.backward();
  loss.reset();
  const auto in_backward = optimizer_in_backward ? 4 * kBlock + kRest + shard + kBlock / 2
                           : reshard             ? 4 * kBlock + kRest + 2 * shard
                                                 : shard + kWhole + 3 * kBlock / 2;
  const auto backward_peak = usage.peak();
  EXPECT_TRUE(within(backward_peak, bytes(in_backward) + kAllowance));

  usage.reset_peak();
  if (!optimizer_in_backward) {
    optimizers.front()->step();
  }
  const auto step_peak = usage.peak();
  EXPECT_LE(step_peak, bytes((optimizer_in_backward ? 3 : 4) * shard) + kAllowance);
  if (!optimizer_in_backward) {
    optimizers.front()->zero_grad();
  }
  usage.reset_peak();
  EXPECT_LE(usage.peak(), bytes(3 * shard) + 2 * kAllowance);
  figure(
      "memory, %s%s: forward %.1f of %.1f MB, backward %.1f of %.1f, step %.1f", name,
      placed ? "" : ", copied out", 1e-6 * static_cast<double>(forward_peak),
      1e-6 * static_cast<double>(bytes(in_forward) + kAllowance),
      1e-6 * static_cast<double>(backward_peak),
      1e-6 * static_cast<double>(bytes(in_backward) + kAllowance),
      1e-6 * static_cast<double>(step_peak));
}

TEST_P(MemoryOnGpu, EveryPhaseStaysWithinItsBound) {
  expect_bounds(GetParam(), /*placed=*/true); // as large parameters are
}

TEST_P(MemoryOnGpu, EveryPhaseStaysWithinItsBoundWithCopyOut) {
  const PlacedGathers never(detail::PlaceGathers::Never);
  expect_bounds(GetParam(), /*placed=*/false);
}

INSTANTIATE_TEST_SUITE_P(
    Transformer, MemoryOnGpu, testing::ValuesIn(kMemoryCases), [](const auto& info) {
      return info.param.name;
    });

class GrowthOnGpu : public MemoryOnGpu {
 protected:
  const PlacedGathers placed{detail::PlaceGathers::Always}; // small ones too
};

void train_step(Transformer& net, optim::AdamW& optimizer, int step) {
  net(random_tokens(step, {2, 16}, net->args.vocab_size).cuda()).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
}

TEST_P(GrowthOnGpu, NotAByteOverTwoHundredStepsAndAllIsGivenBack) {
  const auto& [name, reshard, offload, optimizer_in_backward] = GetParam();
  const MemoryUsage usage(gpu());
  int64_t kept = 0; // by libraries, since their first use
  for (int round = 0; round < 3; ++round) {
    {
      auto net = seeded<Transformer>(
          ModelArgs{.n_layers = 4, .vocab_size = 64, .dim = 64, .dropout_p = 0});
      FullyShardOptions options{
          .mesh = init_device_mesh(torch::kCUDA, {2}), .reshard_after_forward = reshard};
      if (offload) {
        options.offload_policy = CPUOffloadPolicy{};
      }
      for (auto& block : net->blocks) {
        fully_shard(block->attention, options);
        fully_shard(block->feed_forward, options);
      }
      shard_transformer(net, options);
      optim::AdamW optimizer(unique_parameters(*net), 1e-3);
      for (int step = 0; step < 5; ++step) {
        train_step(net, optimizer, step);
      }
      const auto after_first = usage.now();
      EXPECT_GE(after_first, 0);
      for (int step = 5; step < 200; ++step) {
        train_step(net, optimizer, step);
      }
      EXPECT_EQ(usage.now(), after_first);
      net(random_tokens(0, {2, 16}, 64).cuda()); // without a backward
    }
    torch::cuda::synchronize();
    kept = round == 0 ? usage.now() : kept;
    EXPECT_EQ(usage.now(), kept) << "round " << round;
    EXPECT_LE(kept, 128 * kMB);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Transformer,
    GrowthOnGpu,
    testing::Values(kMemoryCases[0], kMemoryCases[1], kMemoryCases[2]),
    [](const auto& info) { return info.param.name; });

} // namespace
} // namespace fsdp
