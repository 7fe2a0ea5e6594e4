// An optimizer that steps in backward, next to one that steps after it.
#include <fsdp/activation_checkpointing.h>
#include <fsdp/memory.h>
#include <fsdp/optim.h>
#include <fsdp/step_in_backward.h>

#include <chrono>
#include <future>

#include "offload/repeating.h"

namespace fsdp {
namespace {

using namespace test;
using optim::StepInBackward;
using torch::optim::Optimizer;
using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(std::vector<torch::Tensor>)>;

/// Two parameter groups with different options, so that each update must find its own.
template <class Optim, class Options>
MakeOptimizer two_groups(Options first, Options second) {
  return [=](std::vector<torch::Tensor> params) {
    std::vector<torch::Tensor> matrices, others;
    for (const auto& param : params) {
      (param.dim() > 1 ? matrices : others).push_back(param);
    }
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(matrices, std::make_unique<Options>(first));
    groups.emplace_back(others, std::make_unique<Options>(second));
    return std::make_unique<Optim>(std::move(groups), first);
  };
}

const std::vector<std::pair<std::string, MakeOptimizer>> kOptimizers{
    {"AdamW",
     two_groups<optim::AdamW>(
         torch::optim::AdamWOptions(1e-2).weight_decay(0.1), torch::optim::AdamWOptions(3e-3))},
    {"SGD", two_groups<optim::SGD>(
                torch::optim::SGDOptions(1e-2).momentum(0.9), torch::optim::SGDOptions(1e-3))},
    {"LowPrecisionAdamW",
     two_groups<optim::LowPrecisionAdamW>(
         optim::LowPrecisionAdamWOptions(1e-2), optim::LowPrecisionAdamWOptions(3e-3))},
    {"torch's Adagrad",
     two_groups<torch::optim::Adagrad>(
         torch::optim::AdagradOptions(1e-2), torch::optim::AdagradOptions(3e-3))}};

/// Copies of a policy share its budget, so each model gets a policy of its own.
const std::vector<std::pair<std::string, std::function<AnyOffloadPolicy()>>> kPolicies{
    {"on the device", [] { return OffloadPolicy{}; }},
    {"offloaded", [] { return CPUOffloadPolicy{}; }},
    {"in part", [] { return CPUOffloadPolicy{.budget = 20000}; }}};

/// Trains both, `net` with steps in backward. `backward(net, step)` is all of a step but the
/// update.
template <class Holder, class Backward>
void expect_same_training(
    Holder& net, Holder& other, const MakeOptimizer& make, const Backward& backward) {
  const auto optimizer = make(unique_parameters(*net));
  const auto after = make(unique_parameters(*other));
  StepInBackward updates(net, *optimizer);
  for (int step = 0; step < 4; ++step) {
    SCOPED_TRACE_OF(step);
    backward(net, step);
    updates.finish();
    backward(other, step);
    after->step();
    after->zero_grad();
    expect_same_values(net, other);
  }
}

const auto kTransformer = ModelArgs{.n_layers = 3, .dropout_p = 0};
const auto kAdamW = kOptimizers.front().second;

TEST(StepInBackward, EqualsAStepAfterIt) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [](int) {
      for (const auto& [policy_name, make_policy] : kPolicies) {
        for (const auto& [optimizer_name, make] : kOptimizers) {
          for (const bool reshard : {true, false}) {
            SCOPED_TRACE_OF(policy_name, optimizer_name, reshard);
            auto [net, other] = twins<Transformer>(kTransformer);
            for (auto* each : {&net, &other}) {
              shard_transformer(
                  *each, {.reshard_after_forward = reshard, .offload_policy = make_policy()});
            }
            expect_same_training(net, other, make, [](Transformer& each, int step) {
              transformer_loss(each, step).backward();
            });
          }
        }
      }
    });
  }
}

TEST(StepInBackward, WithReplicasAndCasts) {
  run_ranks(4, [](int) {
    for (const auto& [policy_name, make_policy] : kPolicies) {
      SCOPED_TRACE_OF(policy_name);
      auto [net, other] = twins<Transformer>(kTransformer);
      for (auto* each : {&net, &other}) {
        shard_transformer(
            *each, {.mesh = init_device_mesh(test_device(), {2, 2}, {"replicate", "shard"}),
                    .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat},
                    .offload_policy = make_policy()});
      }
      expect_same_training(net, other, kAdamW, [](Transformer& each, int step) {
        transformer_loss(each, step).backward();
      });
    }
  });
}

// The gradients of the last backward complete a step, however those before it were added.
TEST(StepInBackward, WaitsForTheLastMicrobatch) {
  run_ranks(4, [](int) {
    enum class Reduce { EachTime, OverShards, AtTheEnd };
    for (const auto reduce : {Reduce::EachTime, Reduce::OverShards, Reduce::AtTheEnd}) {
      for (const bool offload : {true, false}) {
        SCOPED_TRACE_OF(static_cast<int>(reduce), offload);
        auto [net, other] = twins<Transformer>(kTransformer);
        for (auto* each : {&net, &other}) {
          shard_transformer(
              *each,
              {.mesh = init_device_mesh(test_device(), {2, 2}, {"replicate", "shard"}),
               .offload_policy = offload ? AnyOffloadPolicy(CPUOffloadPolicy{}) : OffloadPolicy{}});
        }
        expect_same_training(net, other, kAdamW, [&](Transformer& each, int step) {
          auto root = FSDPModule::of(each);
          for (int part = 0; part < 3; ++part) {
            const bool is_last = part == 2;
            root.set_is_last_backward(is_last);
            root.set_requires_gradient_sync(is_last || reduce != Reduce::AtTheEnd);
            root.set_requires_all_reduce(is_last || reduce == Reduce::EachTime);
            transformer_loss(each, 3 * step + part).backward();
          }
        });
      }
    }
  });
}

// The first backward through a layer leaves half of its gradient.
TEST(StepInBackward, OfLayersThatRunTwiceOrNotAtAll) {
  run_ranks(2, [](int) {
    for (const bool recomputed : {false, true}) {
      for (const bool offload : {true, false}) {
        SCOPED_TRACE_OF(recomputed, offload);
        auto [net, other] = twins<Repeating>();
        for (auto* each : {&net, &other}) {
          for (auto& mlp : (*each)->mlps) {
            if (recomputed) {
              apply_activation_checkpointing(mlp);
            }
          }
          shard_repeating(
              *each,
              {.offload_policy = offload ? AnyOffloadPolicy(CPUOffloadPolicy{}) : OffloadPolicy{}});
        }
        expect_same_training(net, other, kAdamW, [](Repeating& each, int step) {
          for (const bool is_last : {false, true}) { // which may leave out the last layer
            FSDPModule::of(each).set_is_last_backward(is_last);
            repeating_loss(each, step + is_last).backward();
          }
        });
      }
    }
  });
}

// Its graph may still be there when another forward's backward has ended.
TEST(StepInBackward, AfterForwardsWithoutBackward) {
  run_ranks(2, [](int) {
    auto [net, other] = twins<Transformer>(kTransformer);
    for (auto* each : {&net, &other}) {
      shard_transformer(*each, {.offload_policy = CPUOffloadPolicy{}});
    }
    expect_same_training(net, other, kAdamW, [](Transformer& each, int step) {
      const auto unused = transformer_loss(each, 100 + step);
      transformer_loss(each, step).backward(/*gradient=*/{}, /*retain_graph=*/step % 2 == 0);
    });
  });
}

TEST(StepInBackward, LeavesFrozenAndForeignParametersAlone) {
  run_ranks(2, [](int) {
    auto [net, other] = twins<Stack>(6);
    std::vector<std::unique_ptr<Optimizer>> optimizers;
    for (auto* each : {&net, &other}) {
      auto& mlps = (*each)->mlps;
      mlps[0]->in_proj->weight.set_requires_grad(false);
      for (auto& mlp : mlps) {
        // One parameter of each group is ignored by fully_shard, and one is not in the optimizer.
        fully_shard(
            mlp, {.offload_policy = CPUOffloadPolicy{}, .ignored_params = {mlp->out_proj->bias}});
      }
      fully_shard(
          *each, {.ignored_params = {
                      mlps[0]->out_proj->bias, mlps[1]->out_proj->bias, mlps[2]->out_proj->bias}});
      std::vector<torch::Tensor> params;
      for (const auto& item : (*each)->named_parameters()) {
        if (item.key() != "1.in_proj.bias") {
          params.push_back(item.value());
        }
      }
      optimizers.push_back(kAdamW(params));
    }
    StepInBackward updates(net, *optimizers[0]);
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE_OF(step);
      net(random_batch(step, {4, 6})).pow(2).sum().backward();
      updates.finish();
      other(random_batch(step, {4, 6})).pow(2).sum().backward();
      optimizers[1]->step();
      optimizers[1]->zero_grad();
      const auto others = other->named_parameters();
      for (const auto& item : net->named_parameters()) {
        EXPECT_SAME(item.value(), others[item.key()]) << item.key();
        const auto& expected = others[item.key()].grad(); // of the one that is in no optimizer
        ASSERT_EQ(item.value().grad().defined(), expected.defined()) << item.key();
        if (expected.defined()) {
          EXPECT_SAME(item.value().grad(), expected) << item.key();
        }
      }
    }
  });
}

// The first layer's backward waits until the last layer is updated. Without a thread of its own
// the update would never come.
TEST(StepInBackward, UpdatesWhileBackwardGoesOn) {
  if (test_device() != torch::kCPU) {
    GTEST_SKIP() << "a GPU's backward may be enqueued before anything is reduced";
  }
  run_ranks(2, [](int) {
    auto net = seeded<Repeating>();
    net->rounds = 1;
    shard_repeating(net, {.offload_policy = CPUOffloadPolicy{}});
    std::promise<void> updated;
    int steps = 0;
    WatchedSGD optimizer(net->parameters(), [&] {
      if (steps++ == 0) {
        updated.set_value();
      }
    });
    StepInBackward updates(net, optimizer);
    bool in_time = false;
    net->in_backward = [&] {
      in_time =
          updated.get_future().wait_for(std::chrono::seconds(60)) == std::future_status::ready;
    };
    repeating_loss(net, 0).backward();
    EXPECT_TRUE(in_time);
    updates.finish();
  });
}

TEST(StepInBackward, CountsMemoryForItsRank) {
  if (test_device() != torch::kCPU) {
    GTEST_SKIP() << "counts the memory of CPU tensors";
  }
  run_ranks(2, [](int) {
    memory_stats(torch::kCPU); // begins to count
    auto net = seeded<Repeating>();
    shard_repeating(net, {.offload_policy = CPUOffloadPolicy{}});
    optim::AdamW optimizer(net->parameters());
    StepInBackward updates(net, optimizer);
    const auto step = [&] {
      repeating_loss(net, 0).backward();
      updates.finish();
      return memory_stats(torch::kCPU).allocated;
    };
    const auto before = memory_stats(torch::kCPU).allocated;
    int64_t shard_bytes = 0;
    for (const auto& param : net->parameters()) {
      shard_bytes += static_cast<int64_t>(param.nbytes());
    }
    const auto moments = step() - before;
    EXPECT_GE(moments, 2 * shard_bytes);
    EXPECT_EQ(step() - before, moments);
  });
}

TEST(StepInBackward, EndsWithItsUpdates) {
  run_ranks(2, [](int) {
    auto [net, other] = twins<Repeating>();
    for (auto* each : {&net, &other}) {
      shard_repeating(*each, {.offload_policy = CPUOffloadPolicy{}});
    }
    const auto one = kAdamW(net->parameters());
    const auto two = kAdamW(other->parameters());
    {
      StepInBackward updates(net, *one);
      repeating_loss(net, 0).backward();
      updates.finish();
    }
    repeating_loss(other, 0).backward();
    two->step();
    two->zero_grad();
    repeating_loss(net, 1).backward(); // nobody steps now
    const auto grads = other->named_parameters();
    repeating_loss(other, 1).backward();
    for (const auto& item : net->named_parameters()) {
      ASSERT_EQ(item.value().grad().defined(), grads[item.key()].grad().defined());
      if (item.value().grad().defined()) {
        EXPECT_SAME(item.value().grad(), grads[item.key()].grad());
      }
    }
    StepInBackward again(net, *one);
    again.finish(); // what is left
    two->step();
    two->zero_grad();
    expect_same_values(net, other);
  });
}

} // namespace
} // namespace fsdp
