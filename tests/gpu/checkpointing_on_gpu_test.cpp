// Activation checkpointing on a GPU: backward in threads of autograd's own, and
// dropout that takes no generator.
#include <fsdp/activation_checkpointing.h>

#include "support/gpu.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;
using torch::Tensor;

Tensor gradient(const Tensor& y, const Tensor& x, bool retain = false) {
  return torch::autograd::grad({y.sum()}, {x}, {}, retain)[0];
}

TEST(CheckpointingOnGpu, RecomputesInAutogradsThreads) {
  SKIP_WITHOUT_GPU();
  const auto x = torch::randn({64, 64}, torch::kCUDA).set_requires_grad(true);
  const auto block = [](const Tensor& t) { return t.matmul(t.sin()).tanh().exp(); };
  const auto expected = gradient(block(block(x)), x); // the engine's threads run from here on
  const auto y = checkpoint([block](const Tensor& t) { return block(checkpoint(block, t)); }, x);
  EXPECT_SAME(gradient(y, x, /*retain=*/true), expected);
  EXPECT_SAME(gradient(y, x), expected);
}

TEST(CheckpointingOnGpu, DropoutDrawsTheSameAndLeavesTheGeneratorAlone) {
  SKIP_WITHOUT_GPU();
  const auto noisy = [](const Tensor& t) {
    const auto q = t.view({1, 2, 32, 32});
    const auto attention = torch::scaled_dot_product_attention(q, q.sin(), q.cos(), {}, 0.3);
    return torch::dropout(torch::dropout(attention.exp(), 0.5, true).sin(), 0.5, true);
  };
  const auto run = [&](bool checkpointed) {
    torch::cuda::manual_seed(3);
    const auto x = torch::linspace(-1, 1, 2048, torch::device(torch::kCUDA).dtype(torch::kHalf))
                       .set_requires_grad(true);
    const auto y = checkpointed ? checkpoint(noisy, x) : noisy(x);
    const auto between = torch::rand({4}, torch::kCUDA);
    const auto grad = gradient(y, x);
    return std::vector{y.detach(), between, grad, torch::rand({4}, torch::kCUDA)};
  };
  const auto actual = run(true);
  const auto expected = run(false);
  for (const size_t i : {0, 1, 3}) {
    SCOPED_TRACE_OF(i);
    EXPECT_SAME(actual[i], expected[i]);
  }
  EXPECT_TRUE(near(actual[2], expected[2], 1e-2)); // attention adds up in any order
}

TEST(CheckpointingOnGpu, RanksThatAreThreadsRefuseFusedDropout) {
  SKIP_WITHOUT_GPU();
  run_ranks(2, [](int) {
    const auto x = torch::ones({64}, torch::kCUDA).set_requires_grad(true);
    const auto with = [](double p) {
      return [p](const Tensor& t) { return torch::dropout(t.sin(), p, p > 0).exp(); };
    };
    EXPECT_TRUE(contains(
        message_of<c10::NotImplementedError>([&] { checkpoint(with(0.5), x); }),
        "all ranks of this process share"));
    EXPECT_SAME(gradient(checkpoint(with(0), x), x), gradient(with(0)(x), x));
    // One that takes a generator gets its own.
    std::vector<Tensor> masks;
    checkpoint(
        [&masks](const Tensor& t) {
          masks.push_back(torch::rand_like(t));
          return (t * masks.back()).exp();
        },
        x)
        .sum()
        .backward();
    ASSERT_EQ(masks.size(), 2u);
    EXPECT_SAME(masks[1], masks[0]);
  });
}

class CheckpointedEngineOnGpu : public testing::TestWithParam<int> {};

TEST_P(CheckpointedEngineOnGpu, TrainsLikeTheUnshardedModel) {
  SKIP_WITHOUT_GPU();
  run_ranks(GetParam(), [](int) {
    const auto mesh = init_device_mesh(torch::kCUDA, {get_world_size()});
    for (const bool for_good : {false, true}) {
      for (const ReshardAfterForward& reshard :
           {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
        SCOPED_TRACE_OF(for_good, reshard);
        const ModelArgs args{.n_layers = 3, .dropout_p = 0};
        auto reference = seeded<Transformer>(args);
        reference->to(torch::kCUDA);
        auto net = seeded<Transformer>(
            ModelArgs{.n_layers = 3, .dropout_p = 0, .checkpoint_activations = !for_good});
        for (auto& block : net->blocks) {
          if (for_good) {
            apply_activation_checkpointing(block);
          }
          fully_shard(block->feed_forward, {.mesh = mesh, .reshard_after_forward = reshard});
        }
        shard_transformer(net, {.mesh = mesh, .reshard_after_forward = reshard});
        train_and_compare(net, reference, [](Transformer& each, int step) {
          return each(random_tokens(step, {2, 16}, 8).cuda()).sum();
        });
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CheckpointedEngineOnGpu, testing::Values(2, 4));

} // namespace
} // namespace fsdp
