// What must not go silently wrong: steps, edits and conversions at odd moments.
#include <ATen/autocast_mode.h>
#include <fsdp/debug.h>
#include <torch/csrc/autograd/autograd.h>

#include "state/small_net.h"

namespace fsdp {
namespace {

using namespace test;

/// Collects what TORCH_WARN says.
struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    text += warning.msg() + "\n";
  }
  std::string text;
};

// ------------------------------------------------------------ Steps and edits

TEST(Faces, ZeroGradBetweenForwardAndBackward) {
  run_ranks(2, [](int) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE_OF(reshard);
      auto net = sharded_net(reshard);
      auto reference = seeded<Net>();
      train_and_compare(net, reference, [&](Net& each, int step) {
        auto loss = loss_of(each, step);
        each->zero_grad();
        return loss;
      });
    }
  });
}

TEST(Faces, AStepBetweenForwardAndBackwardThrows) {
  run_ranks(2, [](int) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE_OF(reshard);
      auto net = sharded_net(reshard);
      torch::optim::AdamW optimizer(net->parameters(), 1e-2);
      loss_of(net, 0).backward();
      auto loss = loss_of(net, 1);
      if (!reshard) {
        for (auto& mlp : net->mlps) {
          FSDPModule::of(mlp).reshard();
        }
        FSDPModule::of(net).reshard();
      }
      optimizer.step();
      EXPECT_TRUE(contains(
          message_of<c10::Error>([&] { loss.backward(); }),
          "between its forward and its backward"));
      optimizer.zero_grad();
      auto reference = seeded<Net>();
      const auto whole = reference->named_parameters();
      for (const auto& item : net->named_parameters()) { // what the step made of it
        torch::NoGradGuard no_grad;
        whole[item.key()].copy_(as_dtensor(item.value()).full_tensor());
      }
      train_and_compare(net, reference, loss_of, 2);
    }
  });
}

TEST(Faces, EvaluationAnywhereSeesTheNewestWeights) {
  run_ranks(2, [](int) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE_OF(reshard);
      auto net = sharded_net(reshard);
      auto reference = seeded<Net>();
      torch::optim::SGD sharded_optimizer(net->parameters(), 1e-2); // moves no version counter
      torch::optim::SGD optimizer(reference->parameters(), 1e-2);
      const auto evaluate = [&](int step) {
        torch::NoGradGuard no_grad;
        EXPECT_TRUE(near(loss_of(net, step), loss_of(reference, step), 1e-5));
        for (const auto& param : net->parameters()) {
          EXPECT_EQ(param.sizes(), as_dtensor(param).to_local().sizes());
        }
      };
      for (int step = 0; step < 3; ++step) {
        evaluate(100);
        loss_of(net, step).backward();
        loss_of(reference, step).backward();
        average_gradients(*reference);
        evaluate(101);
        sharded_optimizer.step();
        optimizer.step();
        evaluate(102);
        expect_parity(*net, *reference);
        sharded_optimizer.zero_grad();
        optimizer.zero_grad();
      }
      c10::InferenceMode inference;
      EXPECT_TRUE(near(loss_of(net, 9), loss_of(reference, 9), 1e-5));
    }
  });
}

TEST(Faces, EvaluationWithAGroupOfSeveralKeptModules) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Stack>(6);
    fully_shard({net->mlps[0], net->mlps[1]}, {.reshard_after_forward = false});
    fully_shard(net);
    train_and_compare(net, reference, [](Stack& each, int step) {
      auto loss = each(random_batch(step, {2, 6})).sum();
      loss.backward();
      each->zero_grad();
      {
        torch::NoGradGuard no_grad;
        each(random_batch(step, {2, 6}));
        for (const auto& param : each->parameters()) {
          EXPECT_TRUE(
              !detail::FSDPParam::find(param) ||
              param.sizes() == as_dtensor(param).to_local().sizes());
        }
      }
      return each(random_batch(step, {2, 6})).sum();
    });
  });
}

TEST(Faces, MemoryThatIsKeptIsNotTakenForWhatAStepMadeOfIt) {
  run_ranks(2, [](int) {
    auto net = sharded_net(false);
    auto reference = seeded<Net>();
    auto root = FSDPModule::of(net);
    root.set_reshard_after_backward(false);
    torch::optim::SGD sharded_optimizer(net->parameters(), 1e-1);
    torch::optim::SGD optimizer(reference->parameters(), 1e-1);
    for (int step = 0; step < 3; ++step) {
      auto loss = loss_of(net, step);
      auto expected = loss_of(reference, step);
      EXPECT_TRUE(near(loss.detach(), expected.detach(), 1e-5));
      loss.backward();
      expected.backward();
      EXPECT_TRUE(root.is_unsharded());
      average_gradients(*reference);
      expect_parity(*net, *reference);
      sharded_optimizer.step(); // on shards, although memory is kept
      optimizer.step();
      sharded_optimizer.zero_grad();
      optimizer.zero_grad();
    }
  });
}

TEST(Faces, OptimizersThatWereThereBefore) {
  run_ranks(3, [](int) {
    auto [net, reference] = twins<Net>();
    torch::optim::SGD sharded_optimizer(net->parameters(), 1e-2);
    torch::optim::SGD optimizer(reference->parameters(), 1e-2);
    for (auto& mlp : net->mlps) {
      fully_shard(mlp);
    }
    fully_shard(net);
    for (int step = 0; step < 3; ++step) {
      loss_of(net, step).backward();
      loss_of(reference, step).backward();
      average_gradients(*reference);
      sharded_optimizer.step();
      optimizer.step();
      expect_parity(*net, *reference);
      sharded_optimizer.zero_grad();
      optimizer.zero_grad();
    }
  });
}

// A weight used outside of its module gives a gradient that comes late.
TEST(Faces, LateGradientsAreReducedAtTheEndOfBackward) {
  struct LateImpl : torch::nn::Module {
    LateImpl()
        : first(register_module("first", linear(4, 4))),
          second(register_module("second", linear(4, 4))) {}
    torch::Tensor forward(const torch::Tensor& x) {
      const auto early = x.matmul(second->weight) * 0.5; // before its module runs
      return second(torch::relu(first(x))) + early;
    }
    Linear first, second;
  };
  struct Late : Holder<LateImpl> {
    Late() : Holder<LateImpl>(std::make_shared<Hooked<LateImpl>>()) {}
  };
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Late>();
    fully_shard(net->first);
    fully_shard(net, {.reshard_after_forward = true}); // owns second
    train_and_compare(net, reference, [](Late& each, int step) {
      return each(random_batch(step, {2, 4})).sum();
    });
  });
}

// ------------------------------------------------------------ Conversions

TEST(Faces, ModuleToAfterSharding) {
  for (const int n : {1, 2, 3}) {
    run_ranks(n, [](int) {
      for (const bool after_a_step : {false, true}) {
        SCOPED_TRACE_OF(after_a_step);
        auto net = sharded_net();
        auto reference = seeded<Net>();
        if (after_a_step) {
          loss_of(net, 0).backward();
          loss_of(reference, 0).backward();
          average_gradients(*reference);
        }
        net->to(torch::kDouble);
        reference->to(torch::kDouble);
        for (const auto& param : reference->parameters()) {
          if (param.grad().defined()) {
            param.mutable_grad() = param.grad().to(torch::kDouble);
          }
        }
        for (const auto& param : net->parameters()) {
          EXPECT_EQ(param.scalar_type(), torch::kDouble);
          EXPECT_EQ(as_dtensor(param).scalar_type(), torch::kDouble);
        }
        train_and_compare(net, reference, loss_of);
        loss_of(net, 0).backward();
        for (const auto& param : net->parameters()) {
          EXPECT_EQ(param.grad().scalar_type(), torch::kDouble);
        }
      }
    });
  }
}

TEST(Faces, AssignedDataIsAdopted) {
  run_ranks(3, [](int) {
    for (const bool whole : {false, true}) {
      SCOPED_TRACE_OF(whole);
      auto net = sharded_net();
      auto reference = seeded<Net>();
      const auto fresh = torch::randn({24, 6}, generator(5)).to(test_device());
      auto& weight = net->mlps[1]->in_proj->weight;
      weight.set_data(whole ? fresh.clone() : part_of(fresh, weight).clone());
      reference->mlps[1]->in_proj->weight.set_data(fresh.clone());
      train_and_compare(net, reference, loss_of, 3);
    }
    auto net = sharded_net();
    net->head->bias.set_data(torch::zeros({7}));
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { loss_of(net, 0); }),
        "'head.bias' was given a tensor of sizes [7]"));
  });
}

TEST(Faces, TheModuleIsAsBefore) {
  run_ranks(2, [](int) {
    auto net = sharded_net();
    auto reference = seeded<Net>();
    EXPECT_EQ(net->named_parameters().keys(), reference->named_parameters().keys());
    EXPECT_EQ(net->named_modules().keys(), reference->named_modules().keys());
    net->eval();
    EXPECT_FALSE(net->mlps[0]->is_training());
    net->train();
    int modules = 0;
    net->apply([&](torch::nn::Module&) { ++modules; });
    EXPECT_EQ(modules, 11);
    const auto dtensors = named_dtensors(net);
    EXPECT_EQ(dtensors.keys(), net->named_parameters().keys());
    const auto whole = reference->named_parameters();
    for (const auto& item : dtensors) {
      EXPECT_SAME(item.value().full_tensor(), whole[item.key()].detach());
      EXPECT_EQ(item.value().sizes(), whole[item.key()].sizes());
    }
    loss_of(net, 0).backward();
    loss_of(reference, 0).backward();
    average_gradients(*reference);
    EXPECT_TRUE(near(
        as_dtensor_grad(net->head->weight).full_tensor(), reference->head->weight.grad(), 1e-5));
  });
}

// ------------------------------------------------------------ Modes

TEST(Faces, ShardingAndTheFirstForwardInInferenceMode) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Net>();
    {
      c10::InferenceMode inference;
      for (auto& mlp : net->mlps) {
        fully_shard(mlp);
      }
      fully_shard(net);
      EXPECT_TRUE(near(loss_of(net, 0), loss_of(reference, 0), 1e-5));
    }
    train_and_compare(net, reference, loss_of, 2); // saves the parameters for backward
  });
}

TEST(Faces, Autocast) {
  run_ranks(2, [](int) {
    auto net = sharded_net(true);
    auto reference = seeded<Net>();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    for (int step = 0; step < 3; ++step) {
      auto loss = loss_of(net, step);
      auto expected = loss_of(reference, step);
      EXPECT_TRUE(near(loss.detach(), expected.detach(), 1e-5));
      loss.backward();
      expected.backward();
    }
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    average_gradients(*reference);
    expect_parity(*net, *reference, 1e-2);
  });
}

TEST(Faces, DoubleBackwardAfterUnshard) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<MLP>(4);
    auto handle = fully_shard(net, {.reshard_after_forward = false});
    const auto penalty = [](MLP& each, const std::function<void()>& before) {
      const auto x = random_batch(0, {2, 4}).set_requires_grad(true);
      const auto y = torch::tanh(each(x)).sum();
      const auto grads =
          torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
      before();
      grads[0].pow(2).sum().backward();
      return x.grad();
    };
    const auto actual = penalty(net, [&] { handle.unshard(); });
    const auto expected = penalty(reference, [] {});
    EXPECT_TRUE(near(actual, expected, 1e-5));
    average_gradients(*reference);
    expect_parity(*net, *reference);
  });
}

/// The gradients of `net`'s outputs with regard to a batch, with a graph of their own.
torch::Tensor slopes_of(MLP& net) {
  const auto x = random_batch(0, {2, 4}).set_requires_grad(true);
  const auto y = torch::tanh(net(x)).sum();
  return torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
}

TEST(Faces, AForwardWithoutGradientsBeforeADoubleBackward) {
  for (const auto& reshard : std::vector<ReshardAfterForward>{true, 2, false}) {
    run_ranks(4, [&](int) {
      auto [net, reference] = twins<MLP>(4);
      fully_shard(net, {.reshard_after_forward = reshard});
      for (auto* each : {&net, &reference}) {
        const auto slopes = slopes_of(*each);
        {
          const torch::NoGradGuard no_grad;
          (*each)(random_batch(1, {2, 4}));
        }
        slopes.pow(2).sum().backward();
      }
      average_gradients(*reference);
      expect_parity(*net, *reference);
    });
  }
}

TEST(Faces, ABackwardWithAGraphKeepsOnlyTheGroupsThatItUses) {
  run_ranks(2, [](int) {
    MLP net(4);
    const auto whole_rows = net->out_proj->weight.size(0);
    fully_shard(net->in_proj);
    auto unused = fully_shard(net->out_proj);
    fully_shard(net);
    unused.set_reshard_after_backward(false);
    const auto x = random_batch(0, {2, 4}).set_requires_grad(true);
    net(x).sum().backward();
    const auto y = torch::tanh(net->in_proj(x)).sum();
    y.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    net(x);
    EXPECT_EQ(net->out_proj->weight.size(0), whole_rows / 2);
  });
}

TEST(Faces, ReshardEndsWhatABackwardWithAGraphKeeps) {
  run_ranks(2, [](int) {
    MLP net(4);
    const auto whole_rows = net->in_proj->weight.size(0);
    auto handle = fully_shard(net, {.reshard_after_forward = true});
    slopes_of(net);
    handle.reshard();
    net(random_batch(0, {2, 4}));
    EXPECT_EQ(net->in_proj->weight.size(0), whole_rows / 2);
  });
}

} // namespace
} // namespace fsdp
