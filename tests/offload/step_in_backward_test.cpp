// An optimizer that steps in backward, next to one that steps after it.
#include <fsdp/activation_checkpointing.h>
#include <fsdp/clip_grad_norm.h>
#include <fsdp/grad_scaler.h>
#include <fsdp/memory.h>
#include <fsdp/optim.h>
#include <fsdp/state_dict.h>
#include <fsdp/step_in_backward.h>

#include <chrono>
#include <future>

#include "support/sharded.h"

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

const std::vector<std::pair<std::string, AnyOffloadPolicy>> kPolicies{
    {"on the device", OffloadPolicy{}},
    {"offloaded", CPUOffloadPolicy{}},
    {"in part", CPUOffloadPolicy{.budget = 20000}}};

template <class Holder>
void expect_same_values(const Holder& actual, const Holder& expected) {
  const auto others = expected->named_parameters();
  for (const auto& item : actual->named_parameters()) {
    EXPECT_SAME(item.value(), others[item.key()]) << item.key();
    EXPECT_FALSE(item.value().grad().defined()) << item.key();
  }
}

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
      for (const auto& [policy_name, policy] : kPolicies) {
        for (const auto& [optimizer_name, make] : kOptimizers) {
          for (const bool reshard : {true, false}) {
            SCOPED_TRACE_OF(policy_name, optimizer_name, reshard);
            auto [net, other] = twins<Transformer>(kTransformer);
            for (auto* each : {&net, &other}) {
              shard_transformer(
                  *each, {.reshard_after_forward = reshard, .offload_policy = policy});
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
    for (const auto& [policy_name, policy] : kPolicies) {
      SCOPED_TRACE_OF(policy_name);
      auto [net, other] = twins<Transformer>(kTransformer);
      for (auto* each : {&net, &other}) {
        shard_transformer(
            *each, {.mesh = init_device_mesh(test_device(), {2, 2}, {"replicate", "shard"}),
                    .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat},
                    .offload_policy = policy});
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

/// Runs each of its layers twice, and leaves the last one out of odd steps.
struct RepeatingImpl : torch::nn::Module {
  RepeatingImpl() {
    for (int i = 0; i < 3; ++i) {
      mlps.push_back(register_module("mlp" + std::to_string(i), MLP(6)));
    }
    head = register_module("head", linear(6, 3));
  }
  torch::Tensor forward(torch::Tensor x, int step) {
    for (int round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < mlps.size() - step % 2; ++i) {
        x = x + mlps[i](x);
        if (in_backward && i == 0) {
          x.register_hook([this](torch::Tensor) { in_backward(); });
        }
      }
    }
    return head(x);
  }
  std::vector<MLP> mlps;
  Linear head{nullptr};
  int rounds = 2;
  std::function<void()> in_backward; // called before the backward of the first layer
};
FSDP_MODULE(Repeating);

torch::Tensor repeating_loss(Repeating& net, int step) {
  return net(random_batch(step, {4, 6}), step).pow(2).sum();
}

void shard_repeating(Repeating& net, const FullyShardOptions& options) {
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, options);
  }
  fully_shard(net, options);
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

/// Steps as torch's SGD does, and calls a function before it.
struct WatchedSGD : torch::optim::SGD {
  WatchedSGD(std::vector<torch::Tensor> params, std::function<void()> before)
      : SGD(std::move(params), 0.1), before(std::move(before)) {}
  torch::Tensor step(LossClosure closure = nullptr) override {
    before();
    return SGD::step(std::move(closure));
  }
  std::function<void()> before;
};

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

TEST(StepInBackward, ThrowsTheErrorOfAnUpdate) {
  run_ranks(2, [](int) {
    auto net = seeded<Repeating>();
    shard_repeating(net, {.offload_policy = CPUOffloadPolicy{}});
    bool fails = true;
    WatchedSGD optimizer(net->parameters(), [&] { TORCH_CHECK(!fails, "as asked"); });
    StepInBackward updates(net, optimizer);
    repeating_loss(net, 0).backward();
    EXPECT_TRUE(contains(message_of<c10::Error>([&] { updates.finish(); }), "as asked"));
    for (const auto& param : net->parameters()) {
      EXPECT_FALSE(param.grad().defined());
    }
    fails = false;
    repeating_loss(net, 0).backward();
    updates.finish();
    for (const auto& param : net->parameters()) {
      EXPECT_FALSE(param.grad().defined());
    }
  });
}

TEST(StepInBackward, RefusesWhatItCannotDo) {
  run_ranks(2, [](int) {
    auto net = seeded<Repeating>();
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] {
          optim::AdamW optimizer(net->parameters());
          const StepInBackward updates(net, optimizer);
        }),
        "is not sharded"));
    shard_repeating(net, {.offload_policy = CPUOffloadPolicy{}});
    std::vector<torch::Tensor> matrices;
    for (const auto& param : net->parameters()) {
      if (param.dim() == 2) {
        matrices.push_back(param);
      }
    }
    optim::AdamW of_another(seeded<MLP>(3)->parameters());
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { const StepInBackward updates(net, of_another); }),
        "the optimizer has no parameter of the module"));
    optim::Muon muon(matrices);
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { const StepInBackward updates(net, muon); }),
        "Muon exchanges the matrices of all groups in one step"));
    torch::optim::LBFGS lbfgs(net->parameters());
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { const StepInBackward updates(net, lbfgs); }),
        "LBFGS needs all gradients"));
    optim::AdamW optimizer(net->parameters());
    const StepInBackward updates(net, optimizer);
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { const StepInBackward second(net, optimizer); }),
        "have a hook already, perhaps that of another StepInBackward"));
  });
}

TEST(StepInBackward, SaysWhenFinishWasForgotten) {
  run_ranks(2, [](int) {
    for (const bool offload : {true, false}) {
      SCOPED_TRACE_OF(offload);
      auto net = seeded<Repeating>();
      shard_repeating(
          net,
          {.offload_policy = offload ? AnyOffloadPolicy(CPUOffloadPolicy{}) : OffloadPolicy{}});
      optim::AdamW optimizer(net->parameters());
      StepInBackward updates(net, optimizer);
      repeating_loss(net, 0).backward();
      const std::vector<std::function<void()>> uses{
          [&] { repeating_loss(net, 0); }, [&] { FSDPModule::of(net).reshard(); },
          [&] { get_model_state_dict(net); }};
      for (const auto& use : uses) {
        EXPECT_TRUE(contains(
            message_of<c10::Error>(use),
            "parameter 'head.weight' is still being updated by the StepInBackward; call its "
            "finish() after each backward"));
      }
      updates.finish();
      repeating_loss(net, 0).backward();
      updates.finish();
      auto stack = seeded<Stack>(6); // whose root has no parameters
      for (auto& mlp : stack->mlps) {
        fully_shard(mlp);
      }
      fully_shard(stack);
      optim::AdamW other(stack->parameters());
      StepInBackward of_stack(stack, other);
      stack(random_batch(0, {4, 6})).sum().backward();
      EXPECT_TRUE(contains(
          message_of<c10::Error>([&] { stack(random_batch(1, {4, 6})); }),
          "parameter '0.in_proj.weight' is still being updated"));
      of_stack.finish();
      stack(random_batch(1, {4, 6})).sum().backward();
      of_stack.finish();
    }
  });
}

// It would be lost, or be a second step.
TEST(StepInBackward, SaysWhenAGradientCameTooLate) {
  if (test_device() != torch::kCPU) {
    GTEST_SKIP() << "a thread updates offloaded parameters only";
  }
  run_ranks(2, [](int) {
    auto net = seeded<Repeating>();
    shard_repeating(net, {.offload_policy = CPUOffloadPolicy{}});
    const auto weight = net->mlps[1]->in_proj->weight;
    int groups = 0;
    WatchedSGD optimizer(net->parameters(), [&] {
      if (++groups == 4) { // the other three are updated by now
        weight.mutable_grad() = torch::ones_like(weight);
      }
    });
    StepInBackward updates(net, optimizer);
    repeating_loss(net, 0).backward();
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { updates.finish(); }),
        "parameter 'mlp1.in_proj.weight' got another gradient after it was updated"));
  });
}

// Some of the updates were made, some were not.
TEST(StepInBackward, GoesOnFromACheckpointAfterAnError) {
  run_ranks(2, [](int) {
    auto [net, other] = twins<Repeating>();
    net->rounds = other->rounds = 1;
    for (auto* each : {&net, &other}) {
      shard_repeating(*each, {.offload_policy = CPUOffloadPolicy{}});
    }
    const auto good = get_model_state_dict(other);
    torch::optim::SGD optimizer(net->parameters(), 0.1), after(other->parameters(), 0.1);
    StepInBackward updates(net, optimizer);
    net->in_backward = [] { TORCH_CHECK(false, "as asked"); };
    EXPECT_TRUE(
        contains(message_of<c10::Error>([&] { repeating_loss(net, 0).backward(); }), "as asked"));
    net->in_backward = nullptr;
    updates.discard();
    for (const auto& param : net->parameters()) {
      EXPECT_FALSE(param.grad().defined());
    }
    set_model_state_dict(net, good);
    for (int step = 0; step < 2; ++step) {
      repeating_loss(net, step).backward();
      updates.finish();
      repeating_loss(other, step).backward();
      after.step();
      after.zero_grad();
      expect_same_values(net, other);
    }
  });
}

TEST(StepInBackward, RefusesWhatNeedsAllGradients) {
  run_ranks(2, [](int) {
    auto net = seeded<Repeating>();
    shard_repeating(net, {.offload_policy = CPUOffloadPolicy{}});
    optim::AdamW optimizer(net->parameters());
    StepInBackward updates(net, optimizer);
    GradScaler scaler;
    scaler.scale(repeating_loss(net, 0)).backward();
    const auto expect_refused = [](const std::string& api, const auto& use) {
      const auto message = message_of<c10::Error>(use);
      EXPECT_TRUE(contains(message, api + " parameter '"));
      EXPECT_TRUE(contains(message, "is still being updated by the StepInBackward"));
    };
    expect_refused("[clip_grad_norm_]", [&] { clip_grad_norm_(net->parameters(), 1); });
    expect_refused("[GradScaler]", [&] { scaler.unscale_(optimizer); });
    expect_refused("[GradScaler]", [&] { scaler.step(optimizer); });
    updates.finish();
  });
}

// The update of one rank takes longer than that of the other, which must not matter.
TEST(StepInBackward, AllRanksRefuseASecondBackward) {
  run_ranks(2, [](int rank) {
    for (const bool recomputed : {false, true}) {
      auto net = seeded<Repeating>();
      if (recomputed) {
        for (auto& mlp : net->mlps) {
          apply_activation_checkpointing(mlp);
        }
      }
      shard_repeating(net, {.offload_policy = CPUOffloadPolicy{}});
      optim::AdamW optimizer(net->parameters());
      StepInBackward updates(net, optimizer, [&](const auto&) {
        std::this_thread::sleep_for(std::chrono::milliseconds(rank == 0 ? 0 : 50));
      });
      const auto loss = repeating_loss(net, 0);
      loss.backward({}, /*retain_graph=*/true);
      EXPECT_TRUE(contains(
          message_of<c10::Error>([&] { loss.backward(); }),
          "is still being updated by the StepInBackward; call its finish() after each backward"));
      updates.discard();
      repeating_loss(net, 1).backward();
      updates.finish();
    }
  });
}

TEST(StepInBackward, SaysWhoChangedAGradient) {
  run_ranks(2, [](int) {
    for (const bool offload : {true, false}) {
      for (const bool clears : {true, false}) {
        SCOPED_TRACE_OF(offload, clears);
        auto net = seeded<Repeating>();
        shard_repeating(
            net,
            {.offload_policy = offload ? AnyOffloadPolicy(CPUOffloadPolicy{}) : OffloadPolicy{}});
        const auto changed = net->head->weight;
        optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
        std::promise<void> is_changed;
        auto waits = is_changed.get_future().share();
        StepInBackward updates(net, optimizer, [&](const auto& params) {
          if (!params.front().is_same(changed)) { // the head is the last one
            waits.wait();
          }
        });
        repeating_loss(net, 0).backward();
        if (clears) {
          optimizer.zero_grad();
        } else {
          changed.mutable_grad().mul_(0.5);
        }
        is_changed.set_value();
        EXPECT_TRUE(contains(
            message_of<c10::Error>([&] { updates.finish(); }), "was changed or cleared between"));
        updates.discard();
      }
    }
  });
}

TEST(StepInBackward, DoesNotWaitForItself) {
  run_ranks(2, [](int) {
    auto net = seeded<Repeating>();
    shard_repeating(net, {.offload_policy = CPUOffloadPolicy{}});
    optim::AdamW optimizer(net->parameters());
    StepInBackward* updates = nullptr;
    StepInBackward own(net, optimizer, [&](const auto&) { updates->finish(); });
    updates = &own;
    repeating_loss(net, 0).backward();
    if (test_device() == torch::kCPU) {
      EXPECT_TRUE(contains(
          message_of<c10::Error>([&] { own.finish(); }), "before_update must not call finish()"));
    }
    own.discard();
  });
}

TEST(StepInBackward, SaysThatParametersCameTooLate) {
  run_ranks(2, [](int) {
    auto net = seeded<Repeating>();
    shard_repeating(net, {.offload_policy = CPUOffloadPolicy{}});
    auto params = net->parameters();
    const std::vector<torch::Tensor> late(params.end() - 2, params.end());
    params.resize(params.size() - 2);
    optim::AdamW optimizer(params);
    StepInBackward updates(net, optimizer);
    optimizer.add_param_group(torch::optim::OptimizerParamGroup(late));
    repeating_loss(net, 0).backward();
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { updates.finish(); }),
        "make a StepInBackward after its parameter groups are complete"));
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
