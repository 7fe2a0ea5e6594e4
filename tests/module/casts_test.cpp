// Casts of inputs and outputs at the borders of modules.
#include "module/by_hand.h"

namespace fsdp {
namespace {

using namespace test;
using Dtypes = std::vector<at::ScalarType>;

// ------------------------------------------------------------ Inputs and outputs

struct LayerImpl : torch::nn::Module {
  LayerImpl() : lin(register_module("lin", linear(16, 16))) {}
  torch::Tensor forward(torch::Tensor x, torch::Tensor y = {}) {
    seen = {x.scalar_type()};
    if (y.defined()) {
      seen.push_back(y.scalar_type());
    }
    const auto z = lin(border.enter(x));
    return border.leave(y.defined() ? z + border.enter(y) : z);
  }
  Linear lin;
  Border border; // by hand, where there is no other
  Dtypes seen;   // before it
};
FSDP_MODULE(Layer);

struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl() : c1(register_module("c1", Layer())), c2(register_module("c2", Layer())) {}
  torch::Tensor forward(torch::Tensor x) {
    seen = x.scalar_type();
    x = c1(x);
    if (skip) {
      return x;
    }
    // What is made here, in between, has not passed the border of the root.
    return border.leave(external ? c2(x, torch::full({1, 16}, 0.3, x.device())) : c2(x));
  }
  Layer c1, c2;
  Border border;
  at::ScalarType seen = at::ScalarType::Undefined;
  bool external = false;
  bool skip = false;
};
FSDP_MODULE(TwoLayers);

using Policies = std::map<std::string, MixedPrecisionPolicy>; // "" is the root's

ByHand<TwoLayers> two_by_hand(const Policies& policies) {
  auto reference = by_hand<TwoLayers>({});
  const auto policy_of = [policies](const std::string& param) {
    const auto found = policies.find(param.substr(0, 2));
    return found != policies.end() ? found->second
           : policies.contains("") ? policies.at("")
                                   : MixedPrecisionPolicy{};
  };
  reference.policy_of = policy_of;
  reference.compute->border = {policy_of("")};
  const auto own = [&](const std::string& name) {
    return policies.contains(name) ? policies.at(name) : MixedPrecisionPolicy{};
  };
  reference.compute->c1->border = {own("c1")};
  reference.compute->c2->border = {own("c2")};
  return reference;
}

struct BorderCase {
  Policies policies;
  Dtypes seen; // by the root, c1, c2
  at::ScalarType output = kFp32;
  std::optional<at::ScalarType> external = {}; // of c2's second input
  bool casts_itself = false;
};

TEST(Casts, AtTheBorderOfEachModule) {
  const MixedPrecisionPolicy fp16{.param_dtype = kFp16};
  const MixedPrecisionPolicy not_cast{.param_dtype = kFp16, .cast_forward_inputs = false};
  const MixedPrecisionPolicy bf16{.param_dtype = kBf16, .reduce_dtype = kFp32};
  const std::vector<BorderCase> cases{
      // One submodule in fp16: cast by us, by itself, and back again.
      {{{"c2", fp16}}, {kFp32, kFp32, kFp16}, kFp16},
      {{{"c2", not_cast}}, {kFp32, kFp32, kFp32}, kFp16, {}, true},
      {{{"c1", {.param_dtype = kFp16, .output_dtype = kFp32}}}, {kFp32, kFp16, kFp32}},
      // An input that is made inside of the root's forward.
      {{{"", fp16}, {"c2", fp16}}, {kFp16, kFp16, kFp16}, kFp16, kFp16},
      {{{"", fp16}, {"c2", not_cast}}, {kFp16, kFp16, kFp16}, kFp32, kFp32},
      // Outputs, and a part that is kept in fp32.
      {{{"", {.param_dtype = kBf16, .output_dtype = kFp32}}}, {kBf16, kBf16, kBf16}, kFp32},
      {{{"", {.output_dtype = kBf16}}}, {kFp32, kFp32, kFp32}, kBf16},
      {{{"", bf16}, {"c1", {.param_dtype = kFp32, .output_dtype = kBf16}}},
       {kBf16, kFp32, kBf16},
       kBf16},
      {{{"", bf16}, {"c2", {.param_dtype = kFp16}}}, {kBf16, kBf16, kFp16}, kFp16},
  };
  for (const int n : {1, 2}) {
    run_ranks(n, [&](int) {
      for (size_t i = 0; i < cases.size(); ++i) {
        SCOPED_TRACE("case " + std::to_string(i));
        const auto& each = cases[i];
        auto net = seeded<TwoLayers>();
        auto reference = two_by_hand(each.policies);
        net->external = reference.compute->external = each.external.has_value();
        if (each.casts_itself) {
          net->c2->border = reference.compute->c2->border = {fp16};
        }
        for (auto* layer : {&net->c1, &net->c2}) {
          const auto found = each.policies.find(layer == &net->c1 ? "c1" : "c2");
          if (found != each.policies.end()) {
            fully_shard(*layer, {.mp_policy = found->second});
          }
        }
        const auto root = each.policies.find("");
        fully_shard(
            net,
            {.mp_policy = root != each.policies.end() ? root->second : MixedPrecisionPolicy{}});
        EXPECT_EQ(net(random_batch(0, {2, 16})).scalar_type(), each.output);
        EXPECT_EQ((Dtypes{net->seen, net->c1->seen[0], net->c2->seen[0]}), each.seen);
        if (each.external) {
          EXPECT_EQ(net->c2->seen.at(1), *each.external);
        }
        train_by_hand(net, reference, {2, 16}, kSquares, 3);
      }
    });
  }
}

// Every module of a group casts for itself, also one that is called alone.
TEST(Casts, InGroupsOfSeveralModules) {
  run_ranks(2, [](int) {
    const MixedPrecisionPolicy cast{
        .param_dtype = kBf16, .reduce_dtype = kFp32, .output_dtype = kFp32};
    auto net = seeded<TwoLayers>();
    auto reference = two_by_hand({{"", cast}, {"c1", cast}, {"c2", cast}});
    fully_shard({net->c1, net->c2}, {.mp_policy = cast});
    fully_shard(net, {.mp_policy = cast});
    train_by_hand(net, reference, {2, 16}, kSquares, 3);
    EXPECT_EQ((Dtypes{net->c1->seen[0], net->c2->seen[0]}), (Dtypes{kBf16, kBf16}));

    SideBySide<TwoLayers> both(net, reference);
    net->zero_grad();
    reference.master->zero_grad();
    reference.gather();
    const auto x = random_batch(7, {2, 16});
    auto loss = kSquares(net->c2, x);
    auto expected = kSquares(reference.compute->c2, x);
    EXPECT_SAME(loss.detach(), expected.detach());
    loss.backward();
    expected.backward();
    reference.accumulate();
    both.step();
  });
}

TEST(Casts, OfOutputsWhereAGroupDoesNotRunWhole) {
  run_ranks(2, [](int) {
    for (const bool everywhere : {true, false}) {
      SCOPED_TRACE_OF(everywhere);
      const MixedPrecisionPolicy to_bf16{
          .param_dtype = everywhere ? std::optional(kFp32) : std::nullopt, .output_dtype = kBf16};
      auto net = seeded<TwoLayers>();
      auto reference = two_by_hand({{"c1", to_bf16}, {"c2", to_bf16}});
      fully_shard({net->c1, net->c2}, {.mp_policy = to_bf16});
      fully_shard(net, {.mp_policy = everywhere ? to_bf16 : MixedPrecisionPolicy{}});
      net->skip = reference.compute->skip = true;
      for (int step = 0; step < 3; ++step) {
        const auto x = random_batch(step, {4, 16});
        reference.gather();
        for (auto* each : {&net, &reference.compute}) {
          auto h = (*each)(x);
          EXPECT_EQ(h.scalar_type(), kBf16);
          for (const auto& chunk : h.detach().to(kFp32).chunk(2, 0)) {
            auto y = (*each)->c2(chunk.clone().set_requires_grad(true));
            EXPECT_EQ(y.scalar_type(), kBf16);
            y.sum().backward();
          }
          h.pow(2).sum().backward();
        }
        reference.accumulate();
        reference.reduce();
        expect_parity(*net, *reference.master, 1e-5); // each chunk is reduced by itself
        net->zero_grad();
        reference.master->zero_grad();
      }
    }
  });
}

struct KindsImpl : torch::nn::Module {
  std::vector<torch::Tensor> forward(
      const torch::Tensor& tokens,
      const torch::Tensor& mask,
      const torch::Tensor& wide,
      const torch::Tensor& complex,
      const std::optional<torch::Tensor>& maybe,
      torch::Tensor undefined,
      double scale,
      std::vector<torch::Tensor> list) {
    EXPECT_EQ(scale, 0.1);
    EXPECT_FALSE(undefined.defined());
    std::vector<torch::Tensor> all{tokens, mask, wide, complex, *maybe};
    all.insert(all.end(), list.begin(), list.end());
    return all;
  }
};
FSDP_MODULE(Kinds);

// There are no parameters: nothing to gather, and still a border.
TEST(Casts, OnlyFloatingPointInAndOut) {
  for (const int n : {1, 2}) {
    run_ranks(n, [](int) {
      const std::vector<torch::Tensor> inputs{
          torch::arange(1000, 1004),        torch::ones({2}, torch::kBool),
          torch::full({2}, 1.0 / 3, kFp64), torch::full({2}, 1.0 / 3, torch::kComplexFloat),
          torch::full({2}, 1.0 / 3),        torch::full({2}, 1.0 / 3, kFp16),
          torch::full({2}, 7, torch::kByte)};
      const auto run = [&](const MixedPrecisionPolicy& policy) {
        Kinds net;
        fully_shard(net, {.mp_policy = policy});
        return net(
            inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], torch::Tensor(), 0.1,
            std::vector{inputs[5], inputs[6]});
      };
      const auto expect = [&](const MixedPrecisionPolicy& policy,
                              const std::vector<at::ScalarType>& casts) {
        const auto outputs = run(policy);
        for (size_t i = 0; i < inputs.size(); ++i) {
          auto expected = inputs[i];
          for (const auto dtype : casts) {
            expected = expected.is_floating_point() ? expected.to(dtype) : expected;
          }
          EXPECT_SAME(outputs[i], expected);
        }
      };
      expect({}, {});
      expect({.param_dtype = kBf16}, {kBf16});
      expect({.param_dtype = kBf16, .output_dtype = kFp64}, {kBf16, kFp64});
      expect({.output_dtype = kFp16}, {kFp16});
      expect({.param_dtype = kBf16, .cast_forward_inputs = false}, {});
      expect({.param_dtype = kBf16, .output_dtype = kFp16, .cast_forward_inputs = false}, {kFp16});
    });
  }
}

} // namespace
} // namespace fsdp
