// Which groups stay on the device.
#include <fsdp/meta_init.h>
#include <fsdp/state_dict.h>

#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

constexpr int64_t kCopies = 4; // a shard, its gradient and AdamW's two moments

/// The bytes of this rank's shards of one of the stack's layers.
int64_t layer_bytes(Stack& net) {
  return sharding_plan(net).groups.front().shard_bytes;
}

Stack sharded_stack(const AnyOffloadPolicy& policy, int64_t depth = 4) {
  auto net = seeded<Stack>(16, depth);
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, {.offload_policy = policy});
  }
  fully_shard(net, {.offload_policy = policy});
  return net;
}

/// By layer: whether the budget has kept it on the device.
std::vector<bool> kept(Stack& net) {
  std::vector<bool> result;
  for (auto& mlp : net->mlps) {
    const bool on_host = mlp->in_proj->weight.is_cpu() && test_device() != torch::kCPU;
    EXPECT_EQ(sharding_plan(mlp).groups.front().on_host, on_host);
    result.push_back(!on_host);
  }
  return result;
}

TEST(DeviceBudget, CountsShardsGradientsAndStates) {
  run_ranks(2, [](int) {
    auto whole = sharded_stack({});
    const auto bytes = layer_bytes(whole);
    const DeviceBudget budget(2 * kCopies * bytes + 100);
    EXPECT_EQ(budget.left(), 2 * kCopies * bytes + 100);
    auto net = sharded_stack(CPUOffloadPolicy{.budget = budget});
    EXPECT_EQ(budget.left(), 100);
    if (test_device() != torch::kCPU) {
      EXPECT_EQ(kept(net), (std::vector<bool>{true, true, false, false}));
    }
    const DeviceBudget without_states(2 * bytes, /*states=*/0);
    auto layer = seeded<MLP>(16);
    fully_shard(layer, {.offload_policy = CPUOffloadPolicy{.budget = without_states}});
    EXPECT_EQ(without_states.left(), 0);
    const DeviceBudget of_frozen(bytes);
    auto frozen = seeded<MLP>(16);
    for (auto& param : frozen->parameters()) {
      param.set_requires_grad(false);
    }
    fully_shard(frozen, {.offload_policy = CPUOffloadPolicy{.budget = of_frozen}});
    EXPECT_EQ(of_frozen.left(), 0);
  });
}

// Shards of uneven parameters have other sizes on other ranks, but all ranks decide alike.
TEST(DeviceBudget, IsTheSameOnAllRanks) {
  const DeviceBudget shared(50000); // by all ranks, which are threads
  run_ranks(3, [&](int) {
    auto net = sharded_stack(CPUOffloadPolicy{.budget = shared});
    const auto left = torch::tensor({shared.left()}).to(test_device());
    auto all = torch::empty({3}, left.options());
    default_group().all_gather(all, left);
    EXPECT_TRUE(all.eq(left).all().item<bool>()) << all;
    EXPECT_LT(shared.left(), 50000);
  });
}

TEST(DeviceBudget, ASmallGroupFitsBehindALargeOne) {
  run_ranks(2, [](int) {
    const DeviceBudget budget(1000);
    EXPECT_FALSE(budget.take(1001));
    EXPECT_TRUE(budget.take(400));
    EXPECT_FALSE(budget.take(601));
    EXPECT_TRUE(budget.take(600));
    EXPECT_EQ(budget.left(), 0);
  });
}

TEST(DeviceBudget, RefusesNegativeNumbers) {
  run_ranks(1, [](int) {
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([] { const DeviceBudget budget(-1); }),
        "-1 bytes are less than none"));
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([] { const DeviceBudget budget(1, -1); }),
        "-1 optimizer states are less than none"));
  });
}

TEST(DeviceBudget, TrainsLikeTheUnshardedModel) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [](int) {
      for (const int64_t bytes : {int64_t{0}, int64_t{30000}, int64_t{1} << 40}) {
        SCOPED_TRACE_OF(bytes);
        auto [net, reference] = twins<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0});
        shard_transformer(net, {.offload_policy = CPUOffloadPolicy{.budget = bytes}});
        for (int step = 0; step < 3; ++step) {
          compare_backward(net, reference, transformer_loss, step);
          average_gradients(*reference);
          expect_parity(*net, *reference);
          torch::NoGradGuard no_grad;
          for (const auto* each : {&net, &reference}) {
            for (const auto& param : unique_parameters(**each)) {
              param.sub_(param.grad(), 0.01);
              param.mutable_grad().reset();
            }
          }
        }
      }
    });
  }
}

// Each tensor gets its memory where it belongs.
TEST(DeviceBudget, OfAModelOnMeta) {
  run_ranks(2, [](int) {
    auto whole = sharded_stack({});
    const auto bytes = layer_bytes(whole);
    Stack net{nullptr};
    {
      const MetaInit on_meta;
      net = Stack(16, 4);
    }
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { to_empty(net); }), "is sharded; call fully_shard first"));
    const CPUOffloadPolicy policy{.budget = kCopies * bytes};
    for (auto& mlp : net->mlps) {
      fully_shard(mlp, {.mesh = init_device_mesh(test_device(), {2}), .offload_policy = policy});
    }
    fully_shard(net, {.mesh = init_device_mesh(test_device(), {2}), .offload_policy = policy});
    to_empty(net);
    set_model_state_dict(net, get_model_state_dict(whole));
    EXPECT_TRUE(net->mlps[0]->in_proj->weight.device().type() == test_device());
    EXPECT_TRUE(net->mlps[1]->in_proj->weight.is_cpu());
    const auto x = random_batch(0, {4, 16});
    EXPECT_SAME(net(x), whole(x));
  });
}

} // namespace
} // namespace fsdp
