// What a rank's memory is used for, at every moment of an iteration.
#include <fsdp/memory.h>

#include <thread>

#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

constexpr int64_t kDim = 8;
// In bytes, of one Probe: its parameters, and what two ranks hold of them.
constexpr int64_t kWhole = 4 * (4 * kDim * kDim + 4 * kDim + 4 * kDim * kDim + kDim);
constexpr int64_t kShard = kWhole / 2;
// A gather writes the whole ones where they belong, each from a multiple of 256.
constexpr int64_t kPlaced = 2 * (4 * 4 * kDim * kDim + 256);
constexpr int64_t kOutProj = 4 * (4 * kDim * kDim + kDim);

MemoryStats now() {
  return memory_stats(torch::kCPU);
}

/// Looks around in the middle of its forward, and of its backward when half of
/// its gradients are there.
struct ProbeImpl : MLPImpl {
  ProbeImpl() : MLPImpl(kDim) {}
  torch::Tensor forward(const torch::Tensor& x) {
    in_forward = now();
    const auto hidden = torch::relu(in_proj(x));
    if (hidden.requires_grad()) {
      hidden.register_hook([this](const torch::Tensor&) { in_backward = now(); });
    }
    return torch::relu(out_proj(hidden));
  }
  MemoryStats in_forward;
  MemoryStats in_backward;
};
FSDP_MODULE(Probe);

struct PairImpl : torch::nn::Module {
  PairImpl()
      : first(register_module("first", Probe())), second(register_module("second", Probe())) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return second(first(x));
  }
  Probe first, second;
};
FSDP_MODULE(Pair);

Pair sharded_pair(const ReshardAfterForward& reshard) {
  auto net = seeded<Pair>();
  fully_shard(net->first, {.reshard_after_forward = reshard});
  fully_shard(net->second, {.reshard_after_forward = reshard});
  fully_shard(net, {.reshard_after_forward = reshard});
  return net;
}

/// `gathered` is of so many modules: their parameters, each aligned.
void expect_gathered(const MemoryStats& stats, int64_t modules) {
  EXPECT_GE(stats.gathered, modules * kWhole);
  EXPECT_LE(stats.gathered, modules * (kWhole + 4 * 256));
}

void expect_sum(const MemoryStats& stats) {
  EXPECT_EQ(
      stats.shards + stats.gathered + stats.gradients + stats.communication + stats.other,
      stats.allocated);
  EXPECT_LE(stats.allocated, stats.peak);
}

TEST(MemoryStats, EveryMomentOfAnIteration) {
  run_ranks(2, [](int) {
    const auto before = now();
    {
      auto net = sharded_pair(true);
      auto stats = now();
      EXPECT_EQ(stats.shards, 2 * kShard);
      EXPECT_EQ(stats.allocated - before.allocated, 2 * kShard); // the whole ones are gone
      EXPECT_EQ(stats.gathered + stats.gradients + stats.communication, 0);
      expect_sum(stats);

      auto loss = net(random_batch(0, {4, kDim})).sum();
      for (const auto* probe : {net->first.get(), net->second.get()}) {
        SCOPED_TRACE(probe == net->first.get() ? "first" : "second");
        const auto& inside = probe->in_forward;
        EXPECT_EQ(inside.shards, 2 * kShard);
        expect_gathered(inside, 1);
        EXPECT_EQ(inside.gradients, 0);
        EXPECT_EQ(inside.communication, 0);
        expect_sum(inside);
      }
      stats = now();
      EXPECT_EQ(stats.gathered + stats.gradients + stats.communication, 0);
      EXPECT_GT(stats.other, before.other); // activations
      expect_sum(stats);

      loss.backward();
      // The first one's gather is under way already, from the shards as they are.
      auto inside = net->second->in_backward;
      expect_gathered(inside, 1);
      EXPECT_EQ(inside.gradients, kOutProj);
      EXPECT_EQ(inside.communication, kPlaced);
      expect_sum(inside);
      // The second one's reduction is: its input, and what becomes the gradients.
      inside = net->first->in_backward;
      expect_gathered(inside, 1);
      EXPECT_EQ(inside.gradients, kOutProj);
      EXPECT_EQ(inside.communication, kWhole + kShard);
      expect_sum(inside);
      stats = now();
      EXPECT_EQ(stats.shards, 2 * kShard);
      EXPECT_EQ(stats.gradients, 2 * kShard); // views of one storage per group
      EXPECT_EQ(stats.gathered + stats.communication, 0);
      expect_sum(stats);

      net->zero_grad();
      stats = now();
      EXPECT_EQ(stats.gradients, 0);
      EXPECT_EQ(stats.shards, 2 * kShard);
      expect_sum(stats);
    }
    const auto after = now();
    EXPECT_EQ(after.shards + after.gathered + after.gradients + after.communication, 0);
    EXPECT_EQ(after.allocated, before.allocated);
  });
}

TEST(MemoryStats, WhatIsKeptAfterForward) {
  run_ranks(2, [](int) {
    (void)now(); // counts from here on
    auto net = sharded_pair(false);
    auto loss = net(random_batch(0, {4, kDim})).sum();
    expect_gathered(net->second->in_forward, 2);
    expect_gathered(now(), 2);
    loss.backward();
    EXPECT_EQ(now().gathered, 0);
    expect_sum(now());
  });
  run_ranks(4, [](int) { // half of it each, in pairs
    auto net = sharded_pair(2);
    auto loss = net(random_batch(0, {4, kDim})).sum();
    EXPECT_GE(now().gathered, 2 * kWhole / 2);
    EXPECT_LE(now().gathered, 2 * (kWhole + 4 * 256) / 2);
    loss.backward();
    EXPECT_EQ(now().gathered, 0);
  });
}

TEST(MemoryStats, GathersByHandAndGradientsThatAccumulate) {
  run_ranks(2, [](int) {
    (void)now();
    auto net = seeded<Probe>();
    auto root = fully_shard(net);
    auto handle = root.unshard(/*async_op=*/true);
    auto stats = now();
    EXPECT_EQ(stats.communication, kPlaced);
    EXPECT_EQ(stats.gathered, 0);
    handle->wait();
    stats = now();
    EXPECT_EQ(stats.communication, 0);
    expect_gathered(stats, 1);
    root.reshard();
    EXPECT_EQ(now().gathered, 0);

    root.set_requires_gradient_sync(false);
    net(random_batch(0, {4, kDim})).sum().backward();
    EXPECT_EQ(now().gradients, kWhole); // not reduced yet
    root.set_requires_gradient_sync(true);
    net(random_batch(1, {4, kDim})).sum().backward();
    EXPECT_EQ(now().gradients, kShard);
    expect_sum(now());
  });
}

TEST(MemoryStats, ARankAloneHasNoOtherCopy) {
  run_ranks(1, [](int) {
    (void)now();
    auto net = seeded<Probe>();
    fully_shard(net);
    net(random_batch(0, {4, kDim})).sum().backward();
    EXPECT_EQ(net->in_forward.shards, kWhole);
    EXPECT_EQ(net->in_forward.gathered, 0);
    EXPECT_EQ(now().gradients, kWhole);
    expect_sum(now());
  });
}

TEST(MemoryStats, TheUsersTensorsAreOtherAndPeaksAreRemembered) {
  run_ranks(2, [](int rank) {
    const int64_t numel = 1000 * (rank + 1); // each rank sees its own
    reset_peak_memory_stats(torch::kCPU);
    const auto before = now();
    EXPECT_EQ(before.peak, before.allocated);
    auto mine = torch::empty({numel});
    EXPECT_EQ(now().other - before.other, 4 * numel);
    mine.reset();
    EXPECT_EQ(now().allocated, before.allocated);
    EXPECT_EQ(now().peak - before.peak, 4 * numel);
    reset_peak_memory_stats(torch::kCPU);
    EXPECT_EQ(now().peak, before.peak);
  });
}

TEST(MemoryStats, ModelsFromBeforeCountInTheirCategories) {
  // In a process of its own, nothing is counted until the call.
  run_ranks(2, [](int) {
    auto net = seeded<Probe>();
    auto root = fully_shard(net);
    const auto before = now();
    EXPECT_EQ(before.shards, kShard);
    EXPECT_GE(before.other, 0);
    root.unshard();
    const auto gathered = now();
    expect_gathered(gathered, 1);
    EXPECT_EQ(gathered.allocated - before.allocated, gathered.gathered); // new memory is
    root.reshard();
    EXPECT_EQ(now().allocated, before.allocated);
  });
}

// Ranks of the same number in two worlds at once.
TEST(MemoryStats, WorldsDoNotCountForEachOther) {
  const auto world = [] {
    run_ranks(2, [](int) {
      for (int i = 0; i < 20; ++i) {
        auto net = seeded<MLP>(16);
        fully_shard(net);
        int64_t bytes = 0;
        for (const auto& param : net->parameters()) {
          bytes += 4 * param.numel();
        }
        EXPECT_EQ(memory_stats(torch::kCPU).shards, bytes);
      }
    });
  };
  std::thread other(world);
  world();
  other.join();
}

} // namespace
} // namespace fsdp
