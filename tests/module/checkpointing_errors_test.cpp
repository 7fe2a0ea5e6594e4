// Modules that are checkpointed for good; and what cannot be recomputed, or not
// as it was.
#include <fsdp/activation_checkpointing.h>

#include "module/gradients.h"

namespace fsdp {
namespace {

using namespace test;
using torch::Tensor;
using Names = std::vector<std::string>;

// ------------------------------------------------------------ For good

struct CountedImpl : torch::nn::Cloneable<CountedImpl> {
  CountedImpl() {
    reset();
  }
  void reset() override {
    lin = register_module("lin", linear(4, 4));
  }
  Tensor forward(const Tensor& x, const std::string& how = "exp") {
    ++calls;
    const auto y = lin(x);
    return how == "exp" ? y.exp() : y.sin();
  }
  Linear lin{nullptr};
  int calls = 0;
};
FSDP_MODULE(Counted);

TEST(ApplyActivationCheckpointing, EveryCallFromThenOn) {
  const auto x = leaf({3, 4});
  Counted net;
  const std::vector<Tensor> of{x, net->lin->weight, net->lin->bias};
  const auto expected = gradients(of, [&] { return net(net(x), "sin"); });
  net->calls = 0;
  apply_activation_checkpointing(net);
  const auto y = net(net(x), "sin");
  EXPECT_EQ(net->calls, 2);
  expect_same(gradients(of, [&] { return y; }), expected);
  EXPECT_EQ(net->calls, 4);
  {
    torch::NoGradGuard no_grad;
    net(x);
  }
  EXPECT_EQ(net->calls, 5);

  const auto copy = std::dynamic_pointer_cast<Counted::Impl>(net->clone());
  copy->calls = 0;
  copy->forward(x).sum().backward();
  EXPECT_EQ(copy->calls, 2);

  apply_activation_checkpointing(net, {.early_stop = false}); // the last one counts
  EXPECT_FALSE(net->fsdp_recompute->early_stop);
  // Through an AnyModule, and inside of another.
  torch::nn::Sequential sequence(net, torch::nn::Tanh());
  net->calls = 0;
  checkpoint(sequence, x, std::string("sin")).sum().backward();
  EXPECT_EQ(net->calls, 3);
}

TEST(ApplyActivationCheckpointing, ModulesByNameAndType) {
  Stack net(4);
  Names names;
  EXPECT_EQ(
      apply_activation_checkpointing(
          net,
          [&](const std::string& name, torch::nn::Module& module) {
            names.push_back(name);
            return module.as<MLP>() && name != "1";
          }),
      2u);
  EXPECT_EQ(names.size(), 1u + 3u * 3u);
  EXPECT_TRUE(net->mlps[0]->fsdp_recompute && net->mlps[2]->fsdp_recompute);
  EXPECT_FALSE(net->mlps[1]->fsdp_recompute || net->fsdp_recompute);
}

TEST(ApplyActivationCheckpointing, RefusesWhatItCannotIntercept) {
  EXPECT_TRUE(contains(
      message_of<c10::ValueError>([] { apply_activation_checkpointing(torch::nn::Linear(2, 2)); }),
      "LinearImpl is not hooked"));
  EXPECT_THROW(apply_activation_checkpointing(torch::nn::ModuleList()), c10::ValueError);
  struct MovesImpl : torch::nn::Module {
    Tensor forward(std::unique_ptr<Tensor> x) {
      return x->sin();
    }
  };
  Holder<MovesImpl> moves(std::make_shared<Hooked<MovesImpl>>());
  const auto x = leaf({2});
  moves(std::make_unique<Tensor>(x)).sum().backward();
  apply_activation_checkpointing(moves);
  EXPECT_TRUE(contains(
      message_of<c10::Error>([&] { moves(std::make_unique<Tensor>(x)); }), "cannot be kept"));
  torch::NoGradGuard no_grad;
  EXPECT_SAME(moves(std::make_unique<Tensor>(x)), x.sin());
}

// A choice that fails at one module leaves none checkpointed.
TEST(ApplyActivationCheckpointing, ARefusedChoiceCheckpointsNothing) {
  auto net = Transformer(ModelArgs{});
  EXPECT_THROW(
      apply_activation_checkpointing(
          net, [](const std::string&, torch::nn::Module&) { return true; }),
      c10::ValueError); // dropout is not hooked
  EXPECT_FALSE(net->fsdp_recompute);
  EXPECT_FALSE(net->tok_embeddings->fsdp_recompute);
}

// ------------------------------------------------------------ Errors

/// Does something else, or throws, from the second call on.
struct FickleImpl : torch::nn::Module {
  FickleImpl() : lin(register_module("lin", linear(4, 4))) {}
  Tensor forward(const Tensor& x) {
    const bool again = calls++ > 0;
    TORCH_CHECK(!again || what != "throws", "as asked");
    if (again && what == "fewer") {
      return x.exp();
    }
    if (again && what == "sizes") {
      return lin(x.slice(0, 1)).exp();
    }
    if (again && what == "dtype") {
      return lin(x).to(torch::kDouble).exp();
    }
    const auto y = lin(x).exp();
    return again && what == "more" ? y.sin().cos() : y;
  }
  Linear lin;
  std::string what;
  int calls = 0;
};
FSDP_MODULE(Fickle);

TEST(RecomputedCalls, AnotherForwardInBackwardIsAnErrorThatNamesTheModule) {
  const auto x = leaf({3, 4});
  const auto message = [&](const std::string& what, const ActivationCheckpointOptions& options) {
    Fickle net;
    net->what = what;
    const auto loss = checkpoint(options, net, x).sum();
    return message_of<c10::Error>([&] { loss.backward(); });
  };
  const auto fewer = message("fewer", {});
  EXPECT_TRUE(contains(fewer, "FickleImpl"));
  EXPECT_TRUE(contains(fewer, "saved 1 tensors, and 3 in forward"));
  EXPECT_TRUE(contains(message("fewer", {.determinism_check = false}), "saved 1 tensors"));
  EXPECT_TRUE(contains(message("more", {.early_stop = false}), "saved 5 tensors, and 3"));
  const auto sizes = message("sizes", {});
  EXPECT_TRUE(contains(sizes, "saved tensor"));
  EXPECT_TRUE(contains(sizes, "Float[2, 4] on cpu, and was Float[3, 4] on cpu"));
  EXPECT_TRUE(contains(message("dtype", {}), "Double[3, 4] on cpu, and was Float[3, 4]"));
  EXPECT_TRUE(contains(message("throws", {}), "as asked"));
  EXPECT_TRUE(contains(message("throws", {}), "when backward recomputed"));
  Fickle net;
  net->what = "more"; // hidden by the stop, as in Python
  checkpoint(net, x).sum().backward();
}

TEST(RecomputedCalls, WhatWasWrittenToSinceForwardIsAnError) {
  Linear linear(4, 4);
  const auto x = leaf({3, 4});
  {
    const auto loss = checkpoint(linear, x).sum();
    torch::NoGradGuard no_grad;
    linear->weight.add_(1);
    const auto message = message_of<c10::Error>([&] { loss.backward(); });
    EXPECT_TRUE(contains(message, "Float[4, 4] on cpu, was written to since forward"));
  }
  const auto h = x * 2;
  const auto y = checkpoint(linear, h);
  {
    torch::NoGradGuard no_grad;
    h.add_(1);
  }
  EXPECT_TRUE(contains(
      message_of<c10::Error>([&] { y.sum().backward(); }), "modified by an inplace operation"));
}

TEST(RecomputedCalls, AModuleThatIsGoneIsAnError) {
  const auto x = leaf({3, 4});
  Tensor y = checkpoint(MLP(4), x);
  EXPECT_TRUE(contains(
      message_of<c10::Error>([&] { y.sum().backward(); }), "MLPImpl, but this module is gone"));
  // Of one in no shared_ptr we cannot know; it is there.
  Hooked<CountedImpl> on_the_stack;
  apply_activation_checkpointing(on_the_stack);
  expect_same(gradients({x}, [&] { return on_the_stack.forward(x); }), gradients({x}, [&] {
                return on_the_stack.lin(x).exp();
              }));
}

TEST(RecomputedCalls, AnExceptionInBackwardLeavesAllUsable) {
  run_ranks(1, [](int) {
    const auto x = leaf({3, 4});
    Fickle net;
    net->what = "throws";
    torch::manual_seed(1);
    const auto y = checkpoint(
        [&net](const Tensor& t) { return checkpoint(net, torch::dropout(t, 0.5, true)); }, x);
    const auto state = at::globalContext().defaultGenerator(at::kCPU).get_state();
    for (int i = 0; i < 2; ++i) {
      EXPECT_THROW(y.sum().backward({}, /*retain_graph=*/true), c10::Error);
      EXPECT_SAME(at::globalContext().defaultGenerator(at::kCPU).get_state(), state);
    }
    net->what = "";
    expect_same(gradients({x}, [&] { return y; }), gradients({x}, [&] {
                  torch::manual_seed(1);
                  return net(torch::dropout(x, 0.5, true));
                }));
    // Nothing is dropped any more.
    const auto z = x.sin().exp();
    expect_same(gradients({x}, [&] { return z; }), gradients({x}, [&] { return x.sin().exp(); }));
  });
}

} // namespace
} // namespace fsdp
