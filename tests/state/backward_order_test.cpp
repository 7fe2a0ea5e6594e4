// Backwards at unusual times: before, inside, after and of other passes.
#include <fsdp/state_dict.h>
#include <torch/csrc/autograd/autograd.h>

#include "module/lambda.h"
#include "state/mixed_net.h"

namespace fsdp {
namespace {

using namespace test;

TEST(BackwardOrder, AForwardThatFailsKeepsWhatMicrobatchesAccumulated) {
  run_ranks(2, [](int) {
    bool fail = false;
    const auto body = [&fail](Linear& lin, const torch::Tensor& x) {
      TORCH_CHECK(!fail, "a bad batch");
      return std::vector{lin(x)};
    };
    auto [net, reference] = twins<Lambda>(body);
    auto root = fully_shard(net);
    root.set_requires_gradient_sync(false);
    net(lambda_input())[0].sum().backward();
    fail = true;
    EXPECT_THROW(net(lambda_input()), c10::Error);
    fail = false;
    root.set_requires_gradient_sync(true);
    net(lambda_input())[0].sum().backward();
    for (int i = 0; i < 2; ++i) {
      reference(lambda_input())[0].sum().backward();
    }
    average_gradients(*reference);
    expect_parity(*net, *reference);
  });
}

TEST(BackwardOrder, ALossOfTheParametersAlone) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<MLP>(6);
    auto root = fully_shard(net);
    const auto loss_of = [](MLP& each) { return each(random_batch(0, {2, 6})).sum(); };
    loss_of(net).backward();
    loss_of(reference).backward();
    average_gradients(*reference);
    root.unshard();
    net->in_proj->weight.pow(2).sum().backward(); // no output hook announces it
    reference->in_proj->weight.pow(2).sum().backward();
    expect_parity(*net, *reference);
    EXPECT_FALSE(root.is_unsharded());
  });
}

TEST(BackwardOrder, ABackwardInsideForward) {
  struct ForcesImpl : torch::nn::Module {
    ForcesImpl()
        : energy(register_module("energy", linear(6, 6))),
          head(register_module("head", linear(6, 6))) {}
    torch::Tensor forward(const torch::Tensor& x) {
      auto positions = x.detach().clone().set_requires_grad(true);
      const auto forces =
          torch::autograd::grad({torch::tanh(energy(positions)).sum()}, {positions})[0];
      return head(forces);
    }
    Linear energy, head;
  };
  struct Forces : Holder<ForcesImpl> {
    Forces() : Holder<ForcesImpl>(std::make_shared<Hooked<ForcesImpl>>()) {}
  };
  run_ranks(2, [](int) {
    for (const bool inner : {false, true}) {
      SCOPED_TRACE_OF(inner);
      auto [net, reference] = twins<Forces>();
      if (inner) {
        fully_shard(net->energy);
      }
      fully_shard(net);
      train_and_compare(net, reference, [](Forces& each, int step) {
        return each(random_batch(step, {2, 6})).sum();
      });
    }
  });
}

TEST(BackwardOrder, OfAForwardBeforeFullyShard) {
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

TEST(BackwardOrder, AfterTheModuleIsGone) {
  for (const bool reshard : {false, true}) {
    run_ranks(2, [&](int) {
      SCOPED_TRACE_OF(reshard);
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
TEST(BackwardOrder, WithoutTheWeightsThatItNeeds) {
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
TEST(BackwardOrder, WithAHookThatReshards) {
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
TEST(BackwardOrder, OfTwoBackwards) {
  train_mixed(2, [](Mixed& each, int step) {
    torch::Tensor sum = torch::zeros({}, test_device());
    for (const int i : {0, 1}) {
      const auto x = random_batch(2 * step + i, {3, 6}).set_requires_grad(true);
      const auto y = each(x).pow(2).sum();
      const auto slopes = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true);
      sum = sum + slopes[0].pow(2).sum();
    }
    return sum;
  });
}

TEST(BackwardOrder, OfABackward) {
  for (const int n : {1, 2}) {
    train_mixed(n, [](Mixed& each, int step) {
      const auto x = random_batch(step, {3, 6}).set_requires_grad(true);
      const auto y = each(x).pow(2).sum();
      const auto slopes =
          torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
      return y + slopes[0].pow(2).sum();
    });
  }
}

} // namespace
} // namespace fsdp
