// Hooks that see reduced gradients.
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

// Small parameters are a group of their own. A hook serves both groups.
TEST(Comms, AnAllReduceHookOfSeveralGroups) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<MLP>(6);
    int calls = 0;
    fully_shard(net, {.min_shard_numel = 30}).set_all_reduce_hook([&](torch::Tensor& flat) {
      ++calls;
      flat.mul_(2);
    });
    net(random_batch(0, {2, 6})).sum().backward();
    (reference(random_batch(0, {2, 6})).sum() * 2).backward();
    average_gradients(*reference);
    expect_parity(*net, *reference);
    EXPECT_EQ(calls, 2);
  });
}

TEST(Comms, PostAccumulateGradHooksRunOnceWithTheReducedGradient) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<MLP>(8);
    fully_shard(net->in_proj);
    fully_shard(net->out_proj);
    fully_shard(net);
    std::map<const at::TensorImpl*, int> calls;
    std::vector<RemovableHandle> handles;
    for (const auto& param : net->parameters()) {
      handles.push_back(register_post_accumulate_grad_hook(param, [&](const torch::Tensor& p) {
        ++calls[p.unsafeGetTensorImpl()];
        EXPECT_EQ(p.grad().sizes(), p.sizes());
      }));
    }
    net(random_batch(0, {2, 8})).sum().backward();
    EXPECT_EQ(calls.size(), 4u);
    for (const auto& [impl, count] : calls) {
      EXPECT_EQ(count, 1);
    }
    for (auto& handle : handles) {
      handle.remove();
      handle.remove();
    }
    net(random_batch(0, {2, 8})).sum().backward();
    EXPECT_EQ(calls.begin()->second, 1);
  });
}

TEST(Comms, AnOptimizerInBackwardEqualsOneAfterIt) {
  run_ranks(2, [](int) {
    auto [net, other] = twins<Transformer>(ModelArgs{.dropout_p = 0});
    shard_transformer(net);
    shard_transformer(other);
    std::map<const at::TensorImpl*, std::unique_ptr<torch::optim::AdamW>> optimizers;
    for (const auto& param : unique_parameters(*net)) {
      optimizers[param.unsafeGetTensorImpl()] =
          std::make_unique<torch::optim::AdamW>(std::vector{param}, 1e-2);
      register_post_accumulate_grad_hook(param, [&](const torch::Tensor& p) {
        auto& optimizer = *optimizers.at(p.unsafeGetTensorImpl());
        optimizer.step();
        optimizer.zero_grad();
      });
    }
    torch::optim::AdamW optimizer(unique_parameters(*other), 1e-2);
    for (int step = 0; step < 10; ++step) {
      auto loss = transformer_loss(net, step);
      auto expected = transformer_loss(other, step);
      EXPECT_SAME(loss.detach(), expected.detach());
      loss.backward();
      expected.backward();
      optimizer.step();
      optimizer.zero_grad();
      const auto whole = other->named_parameters();
      for (const auto& item : net->named_parameters()) {
        EXPECT_SAME(item.value().detach(), whole[item.key()].detach());
      }
    }
  });
}

} // namespace
} // namespace fsdp
