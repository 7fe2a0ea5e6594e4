// Frozen models with small trainable parts, and parameters that are left to
// somebody else.
#include <fsdp/debug.h>
#include <fsdp/nn.h>

#include <set>

#include "module/by_hand.h"

namespace fsdp {
namespace {

using namespace test;

const std::vector<MixedPrecisionPolicy> kPolicies{
    {}, {.param_dtype = kBf16, .reduce_dtype = kFp32}, {.param_dtype = kFp16}};

void set_requires_grad(const torch::nn::Module& module, bool requires_grad) {
  for (const auto& param : module.parameters()) {
    param.set_requires_grad(requires_grad);
  }
}

// ------------------------------------------------------------ LoRA

struct LoraLinearImpl : torch::nn::Module {
  explicit LoraLinearImpl(int64_t dim)
      : base(register_module("base", linear(dim, dim))),
        lora_a(register_module("lora_a", linear(dim, 4, false))),
        lora_b(register_module("lora_b", linear(4, dim, false))) {
    set_requires_grad(*base, false);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return base(x) + 2 * lora_b(lora_a(x));
  }
  Linear base, lora_a, lora_b;
};
FSDP_MODULE(LoraLinear);

struct LoraNetImpl : torch::nn::Module {
  LoraNetImpl() {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module(std::to_string(i), LoraLinear(16)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) {
      x = torch::tanh(layer(x));
    }
    return x;
  }
  std::vector<LoraLinear> layers;
};
FSDP_MODULE(LoraNet);

enum class Groups : std::uint8_t { Root, Layers, BaseAndAdapters };

/// Returns the number of groups with something to train.
int shard_lora(LoraNet& net, Groups groups, const FullyShardOptions& options) {
  for (auto& layer : net->layers) {
    if (groups == Groups::BaseAndAdapters) {
      fully_shard(layer->lora_a, options);
      fully_shard(layer->lora_b, options);
    }
    if (groups != Groups::Root) {
      fully_shard(layer, options);
    }
  }
  fully_shard(net, options);
  return groups == Groups::Root ? 1 : groups == Groups::Layers ? 3 : 6;
}

TEST(Lora, OnlyAdaptersAreTrainedAndReduced) {
  for (const int n : {1, 2, 3}) {
    run_ranks(n, [n](int) {
      for (const auto& policy : kPolicies) {
        for (const auto groups : {Groups::Root, Groups::Layers, Groups::BaseAndAdapters}) {
          for (const bool reshard : {true, false}) {
            SCOPED_TRACE_OF(policy, groups, reshard);
            auto net = seeded<LoraNet>();
            auto reference = by_hand<LoraNet>(policy);
            const int trained =
                shard_lora(net, groups, {.reshard_after_forward = reshard, .mp_policy = policy});
            train_by_hand(net, reference, {4, 16}, kSquares, 4);
            CommDebugMode comm;
            net(random_batch(0, {4, 16})).sum().backward();
            EXPECT_EQ(comm.count("reduce_scatter"), n == 1 ? 0 : trained);
            const auto wire = policy.reduce_dtype.value_or(policy.param_dtype.value_or(kFp32));
            const auto padded = [n](int64_t rows) { return (rows + n - 1) / n * n; };
            const auto elements = n == 1 ? 0 : 3 * (padded(4) * 16 + padded(16) * 4); // A and B
            EXPECT_EQ(
                comm.bytes("reduce_scatter"),
                elements * static_cast<int64_t>(c10::elementSize(wire)));
            EXPECT_FALSE(net->layers[0]->base->weight.grad().defined());
          }
        }
      }
    });
  }
}

TEST(Lora, FrozenBasesBelowInputsThatNeedGradients) {
  run_ranks(2, [](int) {
    for (const auto& policy : kPolicies) {
      SCOPED_TRACE_OF(policy);
      auto net = seeded<LoraNet>();
      auto reference = by_hand<LoraNet>(policy);
      for (auto* each : {&net, &reference.master}) {
        set_requires_grad(**each, false); // nothing to train but what is outside
      }
      shard_lora(net, Groups::BaseAndAdapters, {.mp_policy = policy});
      const auto x = random_batch(0, {4, 16}).set_requires_grad(true);
      const auto expected = random_batch(0, {4, 16}).set_requires_grad(true);
      reference.gather();
      CommDebugMode comm;
      kSquares(net, x).backward();
      kSquares(reference.compute, reference.input(expected)).backward();
      EXPECT_SAME(x.grad(), expected.grad());
      EXPECT_EQ(comm.count("reduce_scatter"), 0);
      expect_parity(*net, *reference.master, kExact);
    }
  });
}

TEST(Lora, AllFrozenAtFirstUnfrozenLaterAndFrozenAgain) {
  for (const int n : {1, 2}) {
    run_ranks(n, [](int) {
      for (const auto& policy : kPolicies) {
        for (const auto groups : {Groups::Root, Groups::Layers, Groups::BaseAndAdapters}) {
          SCOPED_TRACE_OF(policy, groups);
          auto net = seeded<LoraNet>();
          auto reference = by_hand<LoraNet>(policy);
          const auto set = [&](auto which, bool requires_grad) {
            for (auto* each : {&net, &reference.master}) {
              for (auto& layer : (*each)->layers) {
                set_requires_grad(*which(layer), requires_grad);
              }
            }
          };
          const auto all = [](LoraLinear& layer) { return layer.get(); };
          const auto base = [](LoraLinear& layer) { return layer->base.get(); };
          const auto b = [](LoraLinear& layer) { return layer->lora_b.get(); };
          const auto expect_no_loss = [&] {
            const auto x = random_batch(9, {4, 16});
            reference.gather();
            const auto y = net(x);
            EXPECT_FALSE(y.requires_grad());
            EXPECT_SAME(y, reference.compute(reference.input(x)));
          };
          set(all, false);
          shard_lora(net, groups, {.mp_policy = policy});
          expect_no_loss();
          set(b, true);
          train_by_hand(net, reference, {4, 16}, kSquares, 2);
          set(all, true); // the base too
          train_by_hand(net, reference, {4, 16}, kSquares, 2);
          set(all, false);
          expect_no_loss();
          set(base, true); // the other way round
          train_by_hand(net, reference, {4, 16}, kSquares, 2);
        }
      }
    });
  }
}

struct InPlaceImpl : torch::nn::Module {
  InPlaceImpl()
      : layer_0(register_module("layer_0", linear(5, 5))),
        layer_no_grad(register_module("layer_no_grad", linear(5, 5))),
        layer_with_grad(register_module("layer_with_grad", linear(5, 5))) {
    set_requires_grad(*layer_no_grad, false);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = layer_0(x);
    for (int i = 0; i < 3; ++i) {
      x = layer_no_grad(torch::relu(layer_with_grad(x)));
      torch::NoGradGuard no_grad;
      x += torch::relu(layer_with_grad(x)); // into what a module has returned
    }
    return x;
  }
  Linear layer_0, layer_no_grad, layer_with_grad;
};
FSDP_MODULE(InPlace);

TEST(Lora, AnOutputEditedInPlaceWithoutGradients) {
  run_ranks(4, [](int) {
    for (const auto& policy : kPolicies) {
      for (const ReshardAfterForward& reshard :
           {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
        SCOPED_TRACE_OF(policy, reshard);
        auto net = seeded<InPlace>();
        auto reference = by_hand<InPlace>(policy);
        const FullyShardOptions options{.reshard_after_forward = reshard, .mp_policy = policy};
        for (auto* each : {&net->layer_0, &net->layer_no_grad, &net->layer_with_grad}) {
          fully_shard(*each, options);
        }
        fully_shard(net, options);
        train_by_hand(net, reference, {8, 5}, kSquares);
      }
    }
  });
}

// ------------------------------------------------------------ Ignored parameters

std::vector<std::string> managed(ModuleRef module) {
  return named_dtensors(module).keys();
}

struct ScaledImpl : torch::nn::Module {
  ScaledImpl()
      : lin(register_module("lin", linear(16, 16))),
        gain(register_parameter("gain", torch::randn({16}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    seen = gain.scalar_type();
    return lin(x) * gain;
  }
  Linear lin;
  torch::Tensor gain;
  at::ScalarType seen = at::ScalarType::Undefined;
};
FSDP_MODULE(Scaled);

// Not sharded, cast, hooked or reduced: a plain parameter, with this rank's
// gradient.
TEST(Ignored, ParametersArePlainOnes) {
  for (const int n : {1, 2}) {
    run_ranks(n, [n](int) {
      for (const auto& policy : kPolicies) {
        SCOPED_TRACE_OF(policy);
        auto net = seeded<Scaled>();
        auto reference = by_hand<Scaled>(policy);
        reference.policy_of = [&](const std::string& param) {
          return param == "gain" ? MixedPrecisionPolicy{} : policy;
        };
        const auto* data = net->gain.const_data_ptr();
        fully_shard(net, {.mp_policy = policy, .ignored_params = {net->gain}});
        EXPECT_EQ(managed(net), (std::vector<std::string>{"lin.weight", "lin.bias"}));
        EXPECT_EQ(net->named_parameters().keys(), reference.master->named_parameters().keys());
        EXPECT_THROW(as_dtensor(net->gain), c10::ValueError);
        SideBySide<Scaled> both(net, reference);
        for (int step = 0; step < 3; ++step) {
          const auto x = random_batch(step, {4, 16});
          reference.gather();
          CommDebugMode comm;
          kSquares(net, x).backward();
          EXPECT_EQ(comm.bytes("reduce_scatter") > 0, n > 1);
          kSquares(reference.compute, reference.input(x)).backward();
          EXPECT_EQ(net->seen, kFp32);
          if (step != 2) { // cleared, not zeros
            EXPECT_SAME(net->gain.grad(), reference.compute->gain.grad());
          }
          net->gain.mutable_grad() = averaged(net->gain.grad()); // by hand
          reference.accumulate();
          both.step();
        }
        EXPECT_EQ(net->gain.const_data_ptr(), data);
      }
    });
  }
}

struct MixtureImpl : torch::nn::Module {
  MixtureImpl()
      : mlp(register_module("0", MLP(4, true, /*with_buffer=*/true))),
        rest(register_module("1", nn::Sequential(nn::Linear(4, 4), nn::ReLU()))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return rest(mlp(x));
  }
  MLP mlp;
  nn::Sequential rest;
};
FSDP_MODULE(Mixture);

TEST(Ignored, TheRestOfTheirModuleIsManaged) {
  run_ranks(2, [](int) {
    auto net = seeded<Mixture>();
    auto reference = by_hand<Mixture>({});
    auto ignored = net->rest->parameters();
    ignored.push_back(net->mlp->in_proj->weight);
    fully_shard(net, {.ignored_params = ignored});
    EXPECT_EQ(
        managed(net),
        (std::vector<std::string>{"0.in_proj.bias", "0.out_proj.weight", "0.out_proj.bias"}));
    EXPECT_EQ(net->buffers().size(), 1u);
    EXPECT_SAME(net->mlp->buffer, reference.master->mlp->buffer);
    SideBySide<Mixture> both(net, reference);
    for (int step = 0; step < 3; ++step) {
      const auto x = random_batch(step, {2, 4});
      reference.gather();
      kSquares(net, x).backward();
      kSquares(reference.compute, x).backward();
      for (const auto& param : ignored) {
        param.mutable_grad() = averaged(param.grad());
      }
      reference.accumulate();
      both.step();
    }
  });
}

TEST(Ignored, AllOfThem) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<MLP>(4);
    auto handle = fully_shard(net, {.ignored_params = net->parameters()});
    EXPECT_TRUE(is_fsdp_module(net));
    EXPECT_TRUE(managed(net).empty());
    CommDebugMode comm;
    for (int step = 0; step < 2; ++step) {
      const auto x = random_batch(step, {2, 4});
      const auto y = net(x);
      EXPECT_SAME(y.detach(), reference(x).detach());
      y.sum().backward();
      reference(x).sum().backward();
    }
    handle.unshard();
    handle.reshard();
    expect_parity(*net, *reference, kExact); // this rank's own gradients
    EXPECT_EQ(comm.total(), 0);
  });
}

TEST(Ignored, ByAnInnerCallButNotByTheOuterOne) {
  run_ranks(2, [](int) {
    auto net = seeded<Stack>(4, 2);
    auto reference = by_hand<Stack>({}, 4, 2);
    const auto bias = net->mlps[0]->in_proj->bias;
    fully_shard(net->mlps[0], {.ignored_params = {bias}});
    EXPECT_EQ(
        managed(net->mlps[0]),
        (std::vector<std::string>{"in_proj.weight", "out_proj.weight", "out_proj.bias"}));
    fully_shard(net); // takes it
    EXPECT_EQ(managed(net), net->named_parameters().keys());
    EXPECT_EQ(bias.size(0), 8);
    train_by_hand(net, reference, {2, 4}, kSquares, 3);
  });
}

// A{addend, B{subtrahend, lin_b, C{lin_c}}}: B is sharded without C; what is left
// is replicated by somebody else.
struct CImpl : torch::nn::Module {
  CImpl() : lin_c(register_module("lin_c", linear(8, 8))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return lin_c(x);
  }
  Linear lin_c;
};
FSDP_MODULE(C);
struct BImpl : torch::nn::Module {
  BImpl()
      : lin_b(register_module("lin_b", linear(8, 8))),
        module_c(register_module("module_c", C())),
        subtrahend(register_parameter("subtrahend", torch::randn({8, 8}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::relu(module_c(lin_b(x))) - subtrahend;
  }
  Linear lin_b;
  C module_c;
  torch::Tensor subtrahend;
};
FSDP_MODULE(B);
struct AImpl : torch::nn::Module {
  AImpl()
      : module_b(register_module("module_b", B())),
        addend(register_parameter("addend", torch::randn({8, 8}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return module_b(x) + addend;
  }
  B module_b;
  torch::Tensor addend;
};
FSDP_MODULE(A);

TEST(Ignored, ReplicatedAroundAndInsideOfWhatIsSharded) {
  for (const int n : {2, 4}) {
    run_ranks(n, [](int) {
      auto net = seeded<A>();
      auto reference = by_hand<A>({});
      const auto ignored = net->module_b->module_c->parameters();
      fully_shard(net->module_b->lin_b, {.ignored_params = ignored});
      fully_shard(net->module_b, {.ignored_params = ignored});
      std::vector<std::string> sharded;
      for (const auto& item : net->named_modules()) {
        if (is_fsdp_module(*item.value())) {
          sharded.push_back(item.key());
        }
      }
      EXPECT_EQ(sharded.size(), 2u);
      EXPECT_TRUE(is_fsdp_module(net->module_b) && is_fsdp_module(net->module_b->lin_b));
      const auto names = managed(net);
      EXPECT_EQ(
          std::set<std::string>(names.begin(), names.end()),
          (std::set<std::string>{
              "module_b.subtrahend", "module_b.lin_b.weight", "module_b.lin_b.bias"}));
      EXPECT_EQ(net->named_parameters().keys(), reference.master->named_parameters().keys());
      expect_parity(*net, *reference.master, kExact);
      SideBySide<A> both(net, reference);
      for (int step = 0; step < 3; ++step) {
        const auto x = random_batch(step, {8, 8});
        reference.gather();
        auto loss = kSquares(net, x);
        auto expected = kSquares(reference.compute, x);
        EXPECT_SAME(loss.detach(), expected.detach());
        loss.backward();
        expected.backward();
        for (const auto& param : net->parameters()) {
          if (detail::FSDPParam::find(param) == nullptr) {
            param.mutable_grad() = averaged(param.grad());
          }
        }
        reference.accumulate();
        both.step();
      }
    });
  }
}

} // namespace
} // namespace fsdp
