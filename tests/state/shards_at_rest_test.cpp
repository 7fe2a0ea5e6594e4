// What happens to a parameter between two forwards: who may compute with its shard, and whose
// writes count.
#include <fsdp/call.h>
#include <fsdp/state_dict.h>

#include "state/mixed_net.h"

namespace fsdp {
namespace {

using namespace test;

torch::Tensor ones(at::IntArrayRef sizes) {
  return torch::ones(sizes).to(test_device());
}

/// `module` is where the name of the parameter begins.
void expect_refused(const std::string& module, const std::function<void()>& call) {
  const auto message = message_of<c10::Error>(call);
  EXPECT_TRUE(contains(message, "was given parameter '" + module));
  EXPECT_TRUE(contains(message, "' while it is sharded"));
  EXPECT_TRUE(contains(message, "unshard()"));
}

// ------------------------------------------------------------ Calls

TEST(ShardsAtRest, NoModuleComputesWithThem) {
  for (const int n : {1, 2, 3}) {
    run_ranks(n, [](int) {
      auto [net, reference] = twins<Mixed>();
      fully_shard(net->inner);
      auto root = fully_shard(net);
      const auto x = random_batch(0, {3, 6});
      const auto check = [&] {
        expect_refused("head", [&] { net->head(x); });
        expect_refused("plain", [&] { net->plain(x); });
        expect_refused("head", [&] { net->loss(x); });
        expect_refused("inner", [&] { net->inner->as<MLPImpl>()->forward(x); });
        expect_refused("plain", [&] { net->as<MixedImpl>()->forward(x); });
        const auto copy = std::make_shared<Mixed::Impl>(*net);
        expect_refused("head", [&] { copy->head(x); });
        const torch::NoGradGuard no_grad;
        expect_refused("plain", [&] { net->plain(x); });
        expect_refused("plain", [&] { torch::matmul(x, net->plain->weight.t()); });
      };
      mixed_loss(net, 7).backward(); // names are known from here on
      net->zero_grad();
      check();
      train_and_compare(net, reference, mixed_loss, 2);
      check();
      root.unshard();
      EXPECT_EQ(net->head(x).sizes(), c10::IntArrayRef({3, 5}));
      root.reshard();
    });
  }
}

TEST(ShardsAtRest, EveryForwardIsWatched) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Mixed>();
    fully_shard(net->inner);
    fully_shard(net);
    train_and_compare(net, reference, mixed_loss, 2);
    net->around = true;
    expect_refused("inner", [&] { mixed_loss(net, 0); });
    net->around = false;
    train_and_compare(net, reference, mixed_loss, 2);
  });
}

// Where a rank has one row, a shard broadcasts like a number.
TEST(ShardsAtRest, AreNotBroadcast) {
  run_ranks(2, [](int) {
    auto net = seeded<Mixed>();
    fully_shard(net);
    mixed_loss(net, 0).backward();
    EXPECT_EQ(net->scale.numel(), 1);
    expect_refused("scale", [&] { (void)(torch::ones({3, 2}) * net->scale); });
    expect_refused("scale", [&] { (void)(net->scale + torch::ones({2})); });
    expect_refused("scale", [&] { (void)torch::multiply(torch::ones({2}), net->scale); });
    expect_refused("scale", [&] { (void)torch::max(torch::ones({2}), net->scale); });
    expect_refused("scale", [&] { (void)torch::mse_loss(torch::ones({2}), net->scale); });
    expect_refused("head", [&] { (void)torch::kron(torch::ones({2, 2}), net->head->weight); });
    const torch::NoGradGuard no_grad;
    expect_refused("scale", [&] { torch::ones({2}).mul_(0.5).add_(net->scale, 0.5); });
    expect_refused("scale", [&] { torch::ones({2}).copy_(net->scale); });
  });
}

TEST(ShardsAtRest, OfAModuleThatIsShardedByCall) {
  run_ranks(2, [](int) {
    torch::nn::Linear net(6, 5);
    fully_shard(by_call(net));
    const auto x = torch::ones({2, 6});
    const std::shared_ptr<torch::nn::LinearImpl> base = net.ptr();
    EXPECT_EQ(fsdp::call(net, x).sizes(), c10::IntArrayRef({2, 5}));
    fsdp::call(net, x).sum().backward();
    expect_refused("", [&] { net(x); });
    expect_refused("", [&] { base->forward(x); });
  });
}

TEST(ShardsAtRest, MayBeReadAndWritten) {
  run_ranks(2, [](int) {
    auto net = seeded<Mixed>();
    fully_shard(net);
    mixed_loss(net, 0).backward();
    const torch::NoGradGuard no_grad;
    for (auto& param : net->parameters()) {
      const auto before = param.clone();
      param.add_(param.grad(), -0.1).mul_(2).lerp_(before, 0.5);
      param.mul_(torch::ones_like(param));
      EXPECT_EQ(param.norm().dim(), 0);
      EXPECT_TRUE(torch::allclose(param, as_dtensor(param).to_local()));
      (void)torch::cat({param.view(-1), before.view(-1)});
    }
    net->plain->weight.mul_(ones({6})); // rows are divided, columns are not
    // Whoever asks for the shard may compute with it.
    const auto shard = as_dtensor(net->plain->weight).to_local();
    EXPECT_EQ(torch::linear(ones({1, 6}), shard).size(1), shard.size(0));
  });
}

// Backward reads what autograd saved of a shard when the parameter may be whole.
TEST(ShardsAtRest, MayBePenalised) {
  for (const int n : {1, 2, 3}) {
    train_mixed(n, [](Mixed& each, int step) {
      auto penalty = torch::zeros({}, test_device());
      for (const auto& param : each->parameters()) {
        penalty = penalty + param.pow(2).sum();
      }
      penalty = penalty - penalty.detach(); // its value differs between ranks
      return each(random_batch(step, {3, 6})).pow(2).sum() + penalty;
    });
  }
}

// ------------------------------------------------------------ Weights that are written to

void expect_fresh(
    const std::function<void(Mixed&)>& prepare, const std::function<void(Mixed&)>& edit) {
  for (const int n : {1, 2, 3}) {
    run_ranks(n, [&](int) {
      auto [net, reference] = twins<Mixed>();
      fully_shard(net->inner, {.reshard_after_forward = false});
      fully_shard(net);
      prepare(net);
      edit(net);
      {
        const torch::NoGradGuard no_grad;
        for (auto& param : reference->parameters()) {
          param.mul_(2);
        }
      }
      const auto x = random_batch(0, {3, 6});
      EXPECT_TRUE(near(net(x).detach(), reference(x).detach(), 1e-5));
    });
  }
}

void double_shards(Mixed& net) {
  const torch::NoGradGuard no_grad;
  for (const auto& param : net->parameters()) {
    as_dtensor(param).to_local().mul_(2);
  }
}

TEST(WrittenShards, AreGatheredAgainByTheNextForward) {
  expect_fresh([](Mixed& net) { mixed_loss(net, 1); }, double_shards);
}

TEST(WrittenShards, AreGatheredAgainAfterUnshard) {
  expect_fresh([](Mixed& net) { FSDPModule::of(net).unshard(); }, double_shards);
  expect_fresh(
      [](Mixed& net) {
        FSDPModule::of(net).unshard(/*async_op=*/true); // nobody waits
      },
      double_shards);
}

TEST(WrittenShards, AreGatheredAgainBetweenMicrobatches) {
  const auto keep = [](Mixed& net) {
    auto root = FSDPModule::of(net);
    root.set_reshard_after_backward(false);
    root.set_is_last_backward(false);
    mixed_loss(net, 1).backward();
  };
  expect_fresh(keep, [](Mixed& net) {
    const torch::NoGradGuard no_grad;
    for (auto& param : net->parameters()) {
      param.mul_(2);
    }
  });
  expect_fresh(keep, [](Mixed& net) { // which moves no version counter
    for (auto& param : net->parameters()) {
      param.data().mul_(2);
    }
  });
}

TEST(WrittenShards, ThatAStateDictWasLoadedInto) {
  expect_fresh(
      [](Mixed& net) { mixed_loss(net, 1); },
      [](Mixed& net) {
        const auto doubled = get_model_state_dict(net);
        const torch::NoGradGuard no_grad;
        for (const auto& item : doubled) {
          std::get<DTensor>(item.second).to_local().mul_(2); // the shard itself
        }
      });
}

TEST(WrittenShards, BetweenForwardAndBackwardAreAnError) {
  run_ranks(2, [](int) {
    auto net = seeded<Mixed>();
    fully_shard(net->inner);
    fully_shard(net, {.reshard_after_forward = true});
    torch::optim::SGD optimizer(net->parameters(), 0.1); // writes through data()
    mixed_loss(net, 0).backward();
    const auto loss = mixed_loss(net, 1);
    optimizer.step();
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { loss.backward(); }), "between its forward and its backward"));
  });
}

TEST(WrittenWholes, AreAnError) {
  run_ranks(2, [](int) {
    auto net = seeded<Mixed>();
    auto root = fully_shard(net);
    const auto message = "'plain.weight' was written to while it was unsharded";
    const torch::NoGradGuard no_grad;
    root.unshard();
    net->plain->weight.add_(1);
    EXPECT_TRUE(contains(message_of<c10::Error>([&] { root.reshard(); }), message));
    root.reshard(); // says so once
    root.unshard();
    net->plain->weight.add_(1);
    EXPECT_TRUE(contains(message_of<c10::Error>([&] { mixed_loss(net, 0); }), message));
    root.reshard();
    root.unshard();
    net->plain->weight.data().zero_(); // which no version counter tells
    EXPECT_TRUE(contains(message_of<c10::Error>([&] { root.reshard(); }), message));
  });
}

// The step would add each rank's row of the gradient to all rows of the whole parameter.
TEST(WrittenWholes, AStepAfterAForwardWithoutBackwardIsAnError) {
  run_ranks(2, [](int) {
    auto net = seeded<Mixed>();
    fully_shard(net);
    torch::optim::SGD optimizer({net->scale}, 0.1);
    mixed_loss(net, 0).backward();
    mixed_loss(net, 1); // a validation without NoGradGuard
    optimizer.step();
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { mixed_loss(net, 2); }),
        "'scale' was written to while it was unsharded"));
  });
}

TEST(WrittenWholes, AStepBetweenForwardAndBackwardIsAnError) {
  if (test_device() != c10::kCPU) {
    GTEST_SKIP() << "the check would wait for the GPU";
  }
  run_ranks(2, [](int) {
    auto net = seeded<Mixed>();
    fully_shard(net);
    torch::optim::SGD optimizer({net->scale}, 0.1);
    mixed_loss(net, 0).backward();
    const auto loss = mixed_loss(net, 1);
    optimizer.step();
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { loss.backward(); }),
        "'scale' was written to while it was unsharded"));
  });
}

// ------------------------------------------------------------ Uneven shards of any dim

TEST(UnevenShards, AlongAnotherDim) {
  for (const int n : {2, 3, 4}) {
    for (const bool bf16 : {false, true}) {
      run_ranks(n, [&](int) {
        SCOPED_TRACE_OF(bf16);
        auto [net, reference] = twins<MLP>(5);
        FullyShardOptions options{
            .shard_placement_fn = [](const std::string&, const torch::Tensor& param) {
              return std::optional(ShardPlacement{.dim = param.dim() - 1});
            }};
        if (bf16) {
          options.mp_policy.param_dtype = torch::kBFloat16;
        }
        fully_shard(net, options);
        if (bf16) {
          auto loss = net(random_batch(0, {2, 5})).sum();
          loss.backward();
          for (const auto& param : net->parameters()) {
            EXPECT_EQ(param.grad().sizes(), param.sizes());
          }
          return;
        }
        train_and_compare(net, reference, [](MLP& each, int step) {
          return each(random_batch(step, {2, 5})).sum();
        });
      });
    }
  }
}

} // namespace
} // namespace fsdp
