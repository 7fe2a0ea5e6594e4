// Small parameters that stay whole on every rank.
#include <fsdp/debug.h>

#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

torch::Tensor stack_loss(Stack& net, int step) {
  return net(random_batch(step, {2, net->mlps.front()->in_proj->options.in_features()})).sum();
}

/// One group per MLP, of which the biases are small.
Stack sharded_stack(int64_t min_shard_numel, const ReshardAfterForward& reshard = {}) {
  auto net = seeded<Stack>(8, 3);
  const FullyShardOptions options{
      .reshard_after_forward = reshard, .min_shard_numel = min_shard_numel};
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, options);
  }
  fully_shard(net, options);
  return net;
}

TEST(MinShardNumel, TrainsLikeTheUnshardedModel) {
  for (const int n : {1, 2, 3}) {
    run_ranks(n, [](int) {
      for (const ReshardAfterForward& reshard : {ReshardAfterForward(true), {false}, {}}) {
        auto net = sharded_stack(64, reshard);
        auto reference = seeded<Stack>(8, 3);
        train_and_compare(net, reference, stack_loss);
      }
    });
  }
}

TEST(MinShardNumel, KeepsSmallParametersWhole) {
  run_ranks(2, [](int) {
    auto net = sharded_stack(64);
    for (const auto& item : named_dtensors(net)) {
      const auto& whole = item.value();
      const bool is_small = item.key().ends_with("bias");
      EXPECT_EQ(
          whole.placements(),
          std::vector<Placement>{is_small ? Placement(Replicate{}) : Placement(Shard{0})})
          << item.key();
    }
    const auto& mlp = net->mlps[0];
    EXPECT_EQ(mlp->in_proj->bias.sizes(), (std::vector<int64_t>{32}));
    EXPECT_EQ(mlp->in_proj->weight.sizes(), (std::vector<int64_t>{16, 8}));
  });
}

TEST(MinShardNumel, TakesAnAllReduceAndGathersLess) {
  run_ranks(2, [](int) {
    auto net = sharded_stack(64, true);
    stack_loss(net, 0).backward(); // makes what is made once
    CommDebugMode comm;
    stack_loss(net, 1).backward();
    const int64_t weights = 4 * 2 * (32 * 8); // bytes of one MLP's
    EXPECT_EQ(comm.count("all_gather"), 6);
    EXPECT_EQ(comm.bytes("all_gather"), 6 * weights);
    EXPECT_EQ(comm.count("reduce_scatter"), 3);
    EXPECT_EQ(comm.bytes("reduce_scatter"), 3 * weights);
    EXPECT_EQ(comm.count("all_reduce"), 3);
    EXPECT_EQ(comm.bytes("all_reduce"), 3 * 4 * (32 + 8));
  });
}

TEST(MinShardNumel, AllOfThemMayBeSmallOrNone) {
  run_ranks(2, [](int) {
    auto all = sharded_stack(1 << 20, 2);
    CommDebugMode comm;
    stack_loss(all, 0).backward();
    EXPECT_EQ(comm.count("all_gather") + comm.count("reduce_scatter"), 0);
    comm.clear();
    auto none = sharded_stack(1);
    stack_loss(none, 0).backward();
    EXPECT_EQ(comm.count("all_reduce"), 0);
  });
}

TEST(MinShardNumel, APlacementThatIsGivenComesFirst) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(8);
    fully_shard(
        net, {.shard_placement_fn =
                  [](const std::string& name, const torch::Tensor&) {
                    return name == "in_proj.bias" ? std::optional<ShardPlacement>(Shard{0})
                                                  : std::nullopt;
                  },
              .min_shard_numel = 64});
    EXPECT_EQ(net->in_proj->bias.size(0), 16);
    EXPECT_EQ(net->out_proj->bias.size(0), 8);
  });
}

TEST(MinShardNumel, NeedsAMeshOfOneAxis) {
  run_ranks(4, [](int) {
    auto net = seeded<MLP>(8);
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    const auto message = message_of<c10::NotImplementedError>(
        [&] { fully_shard(net, {.mesh = mesh, .min_shard_numel = 64}); });
    EXPECT_TRUE(contains(message, "min_shard_numel of")) << message;
    EXPECT_TRUE(contains(message, "needs a mesh of one axis")) << message;
    EXPECT_EQ(net->in_proj->weight.size(0), 32); // nothing was changed
  });
}

} // namespace
} // namespace fsdp
