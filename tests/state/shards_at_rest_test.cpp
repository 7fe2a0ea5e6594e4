// What happens to a parameter between two forwards: who may compute with its shard, and whose
// writes count.
#include <fsdp/call.h>
#include <fsdp/state_dict.h>
#include <torch/csrc/autograd/autograd.h>

#include "state/small_net.h"

namespace fsdp {
namespace {

using namespace test;

/// Parameters that belong to the root's group, used in several ways.
struct MixedImpl : torch::nn::Module {
  MixedImpl()
      : inner(register_module("inner", MLP(6))),
        head(register_module("head", linear(6, 5))),
        plain(register_module("plain", torch::nn::Linear(6, 6))),
        scale(register_parameter("scale", torch::full({2}, 1.5))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = plain(around ? inner->as<MLPImpl>()->forward(x) : inner(x));
    if (hook && h.requires_grad()) {
      h.register_hook(hook);
    }
    return head(h) * scale.mean();
  }
  torch::Tensor loss(const torch::Tensor& x) {
    return head(x).sum();
  }
  MLP inner;
  Linear head;
  torch::nn::Linear plain;
  torch::Tensor scale;
  bool around = false;
  std::function<void(torch::Tensor)> hook;
};
FSDP_MODULE(Mixed);

torch::Tensor mixed_loss(Mixed& net, int step) {
  return net(random_batch(step, {3, 6})).pow(2).sum();
}

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
    for (const bool reshard : {false, true}) {
      run_ranks(n, [&](int) {
        SCOPED_TRACE_OF(reshard);
        auto [net, reference] = twins<Mixed>();
        fully_shard(net->inner, {.reshard_after_forward = reshard});
        fully_shard(net, {.reshard_after_forward = reshard});
        train_and_compare(net, reference, [&](Mixed& each, int step) {
          auto penalty = torch::zeros({}, test_device());
          for (const auto& param : each->parameters()) {
            penalty = penalty + param.pow(2).sum();
          }
          penalty = penalty - penalty.detach(); // its value differs between ranks
          return each(random_batch(step, {3, 6})).pow(2).sum() + penalty;
        });
      });
    }
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

// ------------------------------------------------------------ Members that are replaced

TEST(ReplacedMembers, AreFoundByTheNextForwards) {
  for (const bool late : {false, true}) {
    run_ranks(2, [&](int) {
      auto [net, reference] = twins<Mixed>();
      fully_shard(net->inner);
      fully_shard(net);
      if (late) {
        train_and_compare(net, reference, mixed_loss, 5);
      }
      const auto expect_found = [&](const std::string& param) {
        std::string message;
        for (int step = 0; step < 8 && message.empty(); ++step) {
          try {
            mixed_loss(net, step).backward();
          } catch (const c10::Error& error) {
            message = error.what_without_backtrace();
          }
        }
        EXPECT_TRUE(contains(message, "does not use its parameter '" + param + "'"));
        EXPECT_TRUE(contains(message, "replaced after fully_shard"));
      };
      const auto weight = net->head->weight;
      net->head->weight = ones({5, 6}).set_requires_grad(true);
      expect_found("head.weight");
      net->head->weight = weight;
      if (!late) {
        net->head = linear(6, 5);
        to_test_device(*net->head);
        expect_found("head.weight");
      }
    });
  }
}

TEST(ReplacedMembers, UnusedParametersAndInputsAreNotMeant) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<DoubleLinear>(6, /*use_second_linear=*/false);
    fully_shard(net);
    auto outside = ones({6, 6}).set_requires_grad(true); // of the sizes of a weight
    for (int step = 0; step < 4; ++step) {
      net(outside * 2).front().sum().backward();
      net(outside).front().sum().backward();
    }
    EXPECT_TRUE(outside.grad().defined());
  });
}

// ------------------------------------------------------------ Backward at odd times

TEST(OddBackward, OfAForwardBeforeFullyShard) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Mixed>();
    const auto before = mixed_loss(net, 0);
    fully_shard(net->inner);
    fully_shard(net);
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { before.backward(); }),
        "a forward that ran before fully_shard"));
    train_and_compare(net, reference, mixed_loss, 2);
  });
}

TEST(OddBackward, AfterTheModuleIsGone) {
  for (const bool reshard : {false, true}) {
    run_ranks(2, [&](int) {
      auto net = seeded<Mixed>();
      fully_shard(net->inner, {.reshard_after_forward = reshard});
      fully_shard(net, {.reshard_after_forward = reshard});
      const auto loss = mixed_loss(net, 0);
      net = nullptr;
      EXPECT_TRUE(
          contains(message_of<c10::Error>([&] { loss.backward(); }), "after the module was gone"));
    });
  }
}

#if TORCH_VERSION_MINOR >= 13 // before, torch has no message for it
TEST(OddBackward, WithoutTheWeightsThatItNeeds) {
  run_ranks(2, [](int) {
    auto net = seeded<Mixed>();
    auto inner = fully_shard(net->inner);
    fully_shard(net);
    inner.set_unshard_in_backward(false);
    const auto loss = mixed_loss(net, 0);
    EXPECT_TRUE(
        contains(message_of<c10::Error>([&] { loss.backward(); }), "set_unshard_in_backward"));
  });
}
#endif

// A hook on an activation runs while the modules before it still need their weights.
TEST(OddBackward, WithAHookThatReshards) {
  run_ranks(2, [](int) {
    for (const bool reshard : {false, true}) {
      SCOPED_TRACE_OF(reshard);
      auto net = seeded<Mixed>();
      auto root = fully_shard(net);
      net->hook = [&](torch::Tensor) {
        if (reshard) {
          root.reshard();
        } else {
          get_model_state_dict(net);
        }
      };
      const auto loss = mixed_loss(net, 0);
      EXPECT_TRUE(
          contains(message_of<c10::Error>([&] { loss.backward(); }), "while its backward runs"));
      net->hook = nullptr;
      mixed_loss(net, 0).backward();
    }
  });
}

// Neither the forward nor the backward of one may free what the other still needs.
TEST(OddBackward, OfTwoBackwards) {
  for (const bool reshard : {false, true}) {
    run_ranks(2, [&](int) {
      auto [net, reference] = twins<Mixed>();
      fully_shard(net->inner, {.reshard_after_forward = reshard});
      fully_shard(net, {.reshard_after_forward = reshard});
      train_and_compare(net, reference, [](Mixed& each, int step) {
        torch::Tensor sum = torch::zeros({}, test_device());
        for (const int i : {0, 1}) {
          const auto x = random_batch(2 * step + i, {3, 6}).set_requires_grad(true);
          const auto y = each(x).pow(2).sum();
          const auto slopes = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true);
          sum = sum + slopes[0].pow(2).sum();
        }
        return sum;
      });
    });
  }
}

TEST(OddBackward, OfABackward) {
  for (const int n : {1, 2}) {
    for (const bool reshard : {false, true}) {
      run_ranks(n, [&](int) {
        auto [net, reference] = twins<Mixed>();
        fully_shard(net->inner, {.reshard_after_forward = reshard});
        fully_shard(net, {.reshard_after_forward = reshard});
        train_and_compare(net, reference, [](Mixed& each, int step) {
          const auto x = random_batch(step, {3, 6}).set_requires_grad(true);
          const auto y = each(x).pow(2).sum();
          const auto slopes =
              torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
          return y + slopes[0].pow(2).sum();
        });
      });
    }
  }
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
