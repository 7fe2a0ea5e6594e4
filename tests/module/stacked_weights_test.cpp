// The weights of experts in one tensor, sharded by the rows of all of them, next to the unsharded
// model.
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

/// The weights of `experts` layers in one tensor.
struct StackedImpl : torch::nn::Module {
  explicit StackedImpl(int64_t experts, int64_t dim = 4)
      : bias(register_parameter("bias", torch::randn({experts, 1, 2 * dim}))),
        w1(register_parameter("w1", torch::randn({experts, dim, 2 * dim}))),
        w2(register_parameter("w2", torch::randn({experts, 2 * dim, dim}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    EXPECT_TRUE(w1.is_contiguous() && w1.dim() == 3);
    return torch::relu(x.matmul(w1) + bias).matmul(w2).sum(0);
  }
  torch::Tensor bias, w1, w2;
};
FSDP_MODULE(Stacked);

std::optional<ShardPlacement> by_rows(const std::string&, const torch::Tensor& param) {
  return param.dim() == 3 ? std::optional<ShardPlacement>(BlockShard{2}) : std::nullopt;
}

TEST(StackedWeights, AreShardedByRows) {
  for (const int n : {1, 2, 3, 4, 7}) {
    run_ranks(n, [&](int) {
      for (const int64_t experts : {0, 2, 3}) {
        for (const ReshardAfterForward& reshard :
             {ReshardAfterForward(true), ReshardAfterForward(false),
              ReshardAfterForward(n % 2 == 0 ? 2 : n)}) {
          for (const bool offload : {true, false}) {
            SCOPED_TRACE_OF(n, experts, reshard, offload);
            auto [net, reference] = twins<Stacked>(experts);
            FullyShardOptions options{
                .reshard_after_forward = reshard, .shard_placement_fn = by_rows};
            if (offload) {
              options.offload_policy = CPUOffloadPolicy{};
            }
            fully_shard(net, options);
            EXPECT_EQ(as_dtensor(net->w1).placements(), (std::vector<Placement>{BlockShard{2}}));
            EXPECT_EQ(net->w1.sizes().slice(2), (std::vector<int64_t>{8}));
            EXPECT_EQ(net->w1.size(0), 1);
            expect_parity(*net, *reference, 0);
            train_and_compare(net, reference, [](Stacked& each, int step) {
              return each(random_batch(step, {3, 4})).pow(2).sum();
            });
          }
        }
      }
    });
  }
}

TEST(StackedWeights, InBf16WithReplicasAndMicrobatches) {
  for (const auto& shape : {std::vector<int64_t>{2, 2}, {4, 1}, {1, 1}}) {
    run_ranks(static_cast<int>(shape[0] * shape[1]), [&](int) {
      const auto mesh = init_device_mesh(test_device(), shape, {"replicate", "shard"});
      std::vector<torch::Tensor> losses;
      for (const bool rows : {true, false}) {
        auto net = seeded<Stacked>(3);
        FullyShardOptions options{
            .mesh = mesh,
            .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}};
        if (rows) {
          options.shard_placement_fn = by_rows;
        }
        auto sharded = fully_shard(net, options);
        optim::AdamW optimizer(net->parameters());
        for (int step = 0; step < 6; ++step) {
          sharded.set_requires_gradient_sync(step % 2 == 1);
          const auto loss = net(random_batch(step, {3, 4})).pow(2).sum();
          loss.backward();
          losses.push_back(loss.detach());
          if (step % 2 == 1) {
            optimizer.step();
            optimizer.zero_grad();
          }
        }
      }
      for (size_t step = 0; step < 6; ++step) {
        EXPECT_SAME(losses[step], losses[step + 6]) << step;
      }
    });
  }
}

TEST(StackedWeights, ThatAreReplicatedOnly) {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2}, {"dp"});
    auto [net, reference] = twins<Stacked>(3);
    distribute_module(net, mesh);
    fully_shard(
        net,
        {.mesh = mesh, .shard_placement_fn = by_rows, .dp_mesh_dims = {{.replicate = {"dp"}}}});
    EXPECT_EQ(net->w1.size(0), 3);
    expect_parity(*net, *reference, 0);
    train_and_compare(net, reference, [](Stacked& each, int step) {
      return each(random_batch(step, {3, 4})).pow(2).sum();
    });
  });
}

// A gather of other dims needs a buffer to copy the parts from.
TEST(StackedWeights, AreGatheredInPlace) {
  if (test_device() != torch::kCPU) {
    GTEST_SKIP() << "counts the memory of CPU tensors";
  }
  run_ranks(4, [](int) {
    memory_stats(torch::kCPU); // begins to count
    const auto peak_of = [](const ShardPlacement& placement) {
      auto net = seeded<Stacked>(2, 32);
      fully_shard(net, {.shard_placement_fn = [&](const std::string& name, const torch::Tensor&) {
                    return name == "bias" ? std::nullopt : std::optional(placement);
                  }});
      const torch::NoGradGuard no_grad;
      const auto x = torch::ones({1, 32});
      net(x);
      reset_peak_memory_stats(torch::kCPU);
      const auto before = memory_stats(torch::kCPU).allocated;
      net(x);
      return memory_stats(torch::kCPU).peak - before;
    };
    const auto whole = int64_t{2} * 2 * 32 * 64 * 4; // bytes of both weights
    const auto by_experts = peak_of(Shard{0});       // which leaves two ranks without any
    EXPECT_LT(peak_of(BlockShard{2}), whole * 5 / 4);
    EXPECT_LT(peak_of(BlockShard{2}), by_experts);
    EXPECT_GT(peak_of(Shard{1}), whole * 9 / 4);
  });
}

} // namespace
} // namespace fsdp
