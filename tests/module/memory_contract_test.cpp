// How much memory training may use: FSDP2's own bounds, as formulas of the
// model's sizes, and on the CPU, where every byte of a rank is counted.
#include <fsdp/meta_init.h>
#include <fsdp/optim.h>

#include "module/memory_model.h"

namespace fsdp {
namespace {

using namespace test;

constexpr int64_t kLargestParam = 4 * kDim * kDim;

torch::Tensor loss_of(Transformer& net, int step) {
  return net(random_tokens(step, {1, 4}, net->args.vocab_size)).sum();
}

// ------------------------------------------------------------ Initialization

TEST(InitMemory, BuiltWholeItIsTheModelAndOneShard) {
  run_ranks(2, [](int) {
    const MemoryUsage usage(torch::kCPU);
    auto net = seeded<Transformer>(kMemoryArgs);
    EXPECT_EQ(usage.now(), bytes(kWhole));
    shard_transformer(net);
    // The first block's shard is made beside all of it; then parameter by
    // parameter goes.
    EXPECT_LE(usage.peak(), bytes(kWhole + kBlock / 2) + kMB);
    EXPECT_EQ(usage.now(), bytes(kShard));
    EXPECT_EQ(memory_stats(torch::kCPU).shards, bytes(kShard));
  });
}

TEST(InitMemory, FromMetaItIsTheShardsAndOneParameter) {
  run_ranks(2, [](int) {
    const MemoryUsage usage(torch::kCPU);
    auto net = [] {
      const MetaInit on_meta;
      return Transformer(kMemoryArgs);
    }();
    shard_transformer(net, {.mesh = init_device_mesh(torch::kCPU, {2})});
    EXPECT_LE(usage.peak(), kMB);
    to_empty(net, torch::kCPU);
    init_parameters(net, [](const std::string&, torch::Tensor& param) {
      torch::nn::init::normal_(param, 0, 0.02);
    });
    EXPECT_TRUE(within(usage.peak(), bytes(kShard + kLargestParam) + kMB));
    EXPECT_LE(usage.now(), bytes(kShard) + kMB);
    EXPECT_EQ(memory_stats(torch::kCPU).shards, bytes(kShard));
    // Forward lays each group's shards side by side, one group at a time.
    usage.reset_peak();
    loss_of(net, 0);
    EXPECT_TRUE(within(usage.peak(), bytes(3 * kBlock + kRest + kShard) + kAllowance));
    EXPECT_EQ(memory_stats(torch::kCPU).shards, bytes(kShard));
  });
}

// ------------------------------------------------------------ Training

class TrainingMemory : public testing::TestWithParam<MemoryCase> {};

TEST_P(TrainingMemory, EveryPhaseStaysWithinItsBound) {
  run_ranks(2, [&](int) {
    const auto& [name, reshard, offload, optimizer_in_backward] = GetParam();
    const MemoryUsage usage(torch::kCPU);
    auto net = seeded<Transformer>(kMemoryArgs);
    FullyShardOptions options{.reshard_after_forward = reshard};
    if (offload) {
      // On a CPU mesh shards and gathered parameters are in one memory, so the
      // bounds are those without.
      options.offload_policy = CPUOffloadPolicy{};
    }
    shard_transformer(net, options);
    const auto optimizers = make_optimizers(*net, optimizer_in_backward);

    usage.reset_peak();
    auto loss = loss_of(net, 0);
    // A block gathered, copied out, and the next one's gather; or all of them.
    const auto in_forward = reshard ? 3 * kBlock + kRest + kShard : kShard + kWhole + kBlock;
    EXPECT_TRUE(within(usage.peak(), bytes(in_forward) + kAllowance));

    usage.reset_peak();
    loss.backward();
    loss.reset();
    // Its gradients and the input of their reduction on top; the output becomes
    // the sharded gradients, which an optimizer inside leaves of one block only.
    const auto in_backward = optimizer_in_backward ? 4 * kBlock + kRest + kShard + kBlock / 2
                             : reshard             ? 4 * kBlock + kRest + 2 * kShard
                                                   : kShard + kWhole + 3 * kBlock / 2;
    EXPECT_TRUE(within(usage.peak(), bytes(in_backward) + kAllowance));
    const auto left = memory_stats(torch::kCPU);
    EXPECT_EQ(left.gathered, 0);
    EXPECT_EQ(left.communication, 0);
    EXPECT_EQ(left.gradients, optimizer_in_backward ? 0 : bytes(kShard));

    usage.reset_peak();
    if (!optimizer_in_backward) {
      optimizers.front()->step();
    }
    const auto in_step = (optimizer_in_backward ? 3 : 4) * kShard;
    EXPECT_TRUE(within(usage.peak(), bytes(in_step) + kAllowance));

    if (!optimizer_in_backward) {
      optimizers.front()->zero_grad();
    }
    usage.reset_peak();
    EXPECT_TRUE(within(usage.peak(), bytes(3 * kShard) + 2 * kAllowance));
    EXPECT_GE(usage.now(), bytes(3 * kShard)); // parameters and two states
  });
}

INSTANTIATE_TEST_SUITE_P(
    Transformer, TrainingMemory, testing::ValuesIn(kMemoryCases), [](const auto& info) {
      return info.param.name;
    });

// ------------------------------------------------------------ Over time

const ModelArgs kSmallArgs{
    .n_layers = 6,
    .vocab_size = 1024,
    .dim = 128,
    .n_heads = 16,
    .dropout_p = 0,
    .weight_tying = false};

Transformer nested_transformer() {
  auto net = seeded<Transformer>(kSmallArgs);
  for (auto& block : net->blocks) {
    fully_shard(block->attention);
    fully_shard(block->feed_forward);
  }
  shard_transformer(net);
  return net;
}

void train_step(Transformer& net, optim::AdamW& optimizer, int step) {
  loss_of(net, step).backward();
  optimizer.step();
  optimizer.zero_grad();
}

TEST(TrainingGrowth, NotAByteOverTenSteps) {
  run_ranks(2, [](int) {
    const MemoryUsage usage(torch::kCPU);
    auto net = nested_transformer();
    optim::AdamW optimizer(unique_parameters(*net), 1e-2);
    train_step(net, optimizer, 0);
    const auto after_first = usage.now();
    EXPECT_GT(after_first, 0);
    for (int step = 1; step <= 10; ++step) {
      train_step(net, optimizer, step);
      EXPECT_EQ(usage.now(), after_first) << "after step " << step;
    }
  });
}

TEST(TrainingGrowth, ADeletedModelGivesBackEveryByte) {
  run_ranks(2, [](int) {
    const MemoryUsage usage(torch::kCPU);
    for (int round = 0; round < 2; ++round) {
      {
        auto net = nested_transformer();
        int64_t numel = 0;
        for (const auto& param : unique_parameters(*net)) {
          numel += param.numel();
        }
        EXPECT_EQ(usage.now(), bytes(numel)); // the shards alone
        optim::AdamW optimizer(unique_parameters(*net), 1e-2);
        train_step(net, optimizer, round);
        loss_of(net, round); // without a backward
      }
      EXPECT_EQ(usage.now(), 0);
    }
  });
}

} // namespace
} // namespace fsdp
