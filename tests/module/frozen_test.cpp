// Parameters that need no gradient, at first, later, or sometimes.
#include <fsdp/call.h>
#include <fsdp/debug.h>
#include <fsdp/tie_weights.h>

#include "module/biases_only.h"

namespace fsdp {
namespace {

using namespace test;

// ------------------------------------------------------------ Frozen parameters

TEST(Frozen, OnlyBiasesTrainableAndOnlyTheyAreReduced) {
  for (const int n : {2, 4}) {
    run_ranks(n, [](int) {
      for (const ReshardAfterForward& reshard :
           {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
        for (const bool freeze_after : {false, true}) {
          train_biases_only(reshard, freeze_after);
        }
      }
    });
  }
}

struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    for (int i = 0; i < 6; ++i) {
      linears.push_back(register_module(std::to_string(2 * i), linear(32, 32)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& each : linears) {
      x = torch::relu(each(x));
    }
    return x;
  }
  std::vector<Linear> linears;
};
FSDP_MODULE(Chain);

TEST(Frozen, FrozenGroupsAndUnfreezingLater) {
  run_ranks(2, [](int) {
    for (const auto& [unfreeze, reshard] : std::vector<std::pair<bool, ReshardAfterForward>>{
             {false, true}, {true, true}, {false, false}, {true, false}, {true, 2}}) {
      SCOPED_TRACE_OF(unfreeze, reshard);
      auto [net, reference] = twins<Chain>();
      for (auto& each : net->linears) {
        fully_shard(each, {.reshard_after_forward = reshard}); // each a root of its own
      }
      const auto set = [](Chain& each, bool requires_grad) {
        for (const size_t i : {0, 2, 3}) {
          for (const auto& param : each->linears[i]->parameters()) {
            param.set_requires_grad(requires_grad);
          }
        }
      };
      const auto loss_of = [](Chain& each, int step) {
        return each(random_batch(step, {2, 32})).sum();
      };
      set(net, false);
      set(reference, false);
      train_and_compare(net, reference, loss_of, 2);
      {
        torch::NoGradGuard no_grad;
        EXPECT_TRUE(near(loss_of(net, 3), loss_of(reference, 3), 1e-5));
      }
      if (unfreeze) {
        set(net, true);
        set(reference, true);
      }
      train_and_compare(net, reference, loss_of, 2);
    }
  });
}

struct MixedGradImpl : torch::nn::Module {
  MixedGradImpl()
      : layer_0(register_module("layer_0", linear(5, 5))),
        layer_no_grad(register_module("layer_no_grad", linear(5, 5))),
        layer_with_grad(register_module("layer_with_grad", linear(5, 5))) {
    for (const auto& param : layer_no_grad->parameters()) {
      param.set_requires_grad(false);
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    x = layer_0(x);
    for (int i = 0; i < 3; ++i) {
      x = layer_no_grad(torch::relu(layer_with_grad(x)));
      torch::Tensor extra;
      {
        torch::NoGradGuard no_grad;
        extra = torch::relu(layer_with_grad(x));
      }
      x = x + extra;
    }
    return x;
  }
  Linear layer_0, layer_no_grad, layer_with_grad;
};
FSDP_MODULE(MixedGrad);

TEST(Frozen, TheSameLayerWithAndWithoutGradientsInOneForward) {
  run_ranks(4, [](int) {
    for (const ReshardAfterForward& reshard :
         {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
      SCOPED_TRACE_OF(reshard);
      auto [net, reference] = twins<MixedGrad>();
      for (auto* each : {&net->layer_0, &net->layer_no_grad, &net->layer_with_grad}) {
        fully_shard(*each, {.reshard_after_forward = reshard});
      }
      fully_shard(net, {.reshard_after_forward = reshard});
      CommDebugMode comm;
      train_and_compare(net, reference, [&](MixedGrad& each, int step) {
        comm.clear();
        return each(random_batch(step, {8, 5})).sum();
      });
      EXPECT_EQ(comm.count("reduce_scatter"), 2);
    }
  });
}

struct TappedImpl : torch::nn::Module {
  TappedImpl()
      : first(register_module("first", Linear(4, 4))),
        second(register_module("second", Linear(4, 4))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    tap = first(x);
    return second(tap);
  }
  Linear first, second;
  torch::Tensor tap;
};
FSDP_MODULE(Tapped);

/// No hook announces this backward: it does not come through an output of the module.
TEST(Frozen, BackwardOfAnIntermediateResultOfAFrozenModule) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Tapped>();
    for (const auto& param : net->parameters()) {
      param.set_requires_grad(false);
    }
    fully_shard(net);
    for (int step = 0; step < 3; ++step) {
      const auto x = random_batch(step, {2, 4}).requires_grad_();
      const auto same_x = x.detach().clone().requires_grad_();
      EXPECT_SAME(net(x).detach(), reference(same_x).detach());
      net->tap.sum().backward();
      reference->tap.sum().backward();
      EXPECT_SAME(x.grad(), same_x.grad());
      torch::NoGradGuard no_grad;
      for (const auto* module : {&*net, &*reference}) { // an optimizer of the shards
        for (const auto& param : module->parameters()) {
          param.mul_(0.5);
        }
      }
    }
  });
}

} // namespace
} // namespace fsdp
