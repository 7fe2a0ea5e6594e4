// What an optimizer that steps in backward refuses, and how one goes on after an error.
#include <fsdp/activation_checkpointing.h>
#include <fsdp/clip_grad_norm.h>
#include <fsdp/grad_scaler.h>
#include <fsdp/optim.h>
#include <fsdp/state_dict.h>
#include <fsdp/step_in_backward.h>

#include <chrono>
#include <future>
#include <thread>

#include "offload/repeating.h"

namespace fsdp {
namespace {

using namespace test;
using optim::StepInBackward;

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
    const auto clipped = message_of<c10::Error>([&] { clip_grad_norm_(net->parameters(), 1); });
    EXPECT_TRUE(contains(clipped, "[clip_grad_norm_] parameter '"));
    EXPECT_TRUE(contains(clipped, "is still being updated by the StepInBackward"));
    const auto expect_refused = [](const auto& use) {
      EXPECT_TRUE(contains(message_of<c10::Error>(use), "[GradScaler] a StepInBackward updates"));
    };
    expect_refused([&] { scaler.unscale_(optimizer); });
    expect_refused([&] { scaler.step(optimizer); });
    updates.finish();
    expect_refused([&] { scaler.unscale_(optimizer); });
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

} // namespace
} // namespace fsdp
