// Which modules of a sharded model run, and how they are called.
#include <fsdp/call.h>
#include <fsdp/debug.h>
#include <fsdp/tie_weights.h>

#include "state/fsdp_state.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

// ------------------------------------------------------------ Which modules run, and how

TEST(Calls, ForwardAndBackwardOfAModuleThatIsNotTheRoot) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Stack>(32);
    for (auto& mlp : net->mlps) {
      fully_shard(mlp);
    }
    fully_shard(net);
    train_and_compare(
        net, reference,
        [](Stack& each, int step) { return each(random_batch(step, {2, 32})).sum(); }, 1);
    CommDebugMode comm;
    train_and_compare(
        net, reference,
        [&](Stack& each, int step) {
          comm.clear();
          return each->mlps[0](random_batch(step + 1, {2, 32})).sum();
        },
        1);
    EXPECT_EQ(comm.count("reduce_scatter"), 1);
    EXPECT_FALSE(net->mlps[1]->in_proj->weight.grad().defined());
    train_and_compare(
        net, reference,
        [](Stack& each, int step) { return each(random_batch(step + 2, {2, 32})).sum(); }, 2);
  });
}

TEST(Calls, SeveralRootsWithAndWithoutASharedContext) {
  run_ranks(2, [](int) {
    for (const bool shared : {false, true}) {
      SCOPED_TRACE_OF(shared);
      auto [net, reference] = twins<Stack>(16);
      std::vector<FSDPModule> roots;
      for (auto& mlp : net->mlps) {
        roots.push_back(fully_shard(mlp));
      }
      share_comm_ctx({});
      if (shared) {
        share_comm_ctx(roots);
      }
      train_and_compare(net, reference, [](Stack& each, int step) {
        return each(random_batch(step, {4, 16})).sum();
      });
      const auto comm_of = [](MLP& mlp) { return &mlp.get()->fsdp_state->comm(); };
      EXPECT_EQ(comm_of(net->mlps[0]) == comm_of(net->mlps[2]), shared);
      EXPECT_EQ(comm_of(net->mlps[0])->num_recorded(), 0u); // nothing is left
      if (shared) {
        share_comm_ctx(roots); // again, after the first forward
      }
      train_and_compare(
          net, reference,
          [](Stack& each, int step) { return each(random_batch(step, {4, 16})).sum(); }, 2);
    }
  });
}

struct MultiForwardImpl : torch::nn::Module {
  MultiForwardImpl()
      : inner(register_module("inner", linear(4, 4))),
        outer(register_module("outer", linear(4, 5))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return outer(inner(x) + inner(x * 2));
  }
  Linear inner, outer;
};
FSDP_MODULE(MultiForward);

TEST(Calls, AModuleThatIsCalledTwice) {
  run_ranks(4, [](int) {
    for (const ReshardAfterForward& reshard :
         {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
      for (const bool needs_grad : {false, true}) {
        SCOPED_TRACE_OF(reshard, needs_grad);
        auto [net, reference] = twins<MultiForward>();
        fully_shard(net->inner, {.reshard_after_forward = reshard});
        fully_shard(net, {.reshard_after_forward = reshard});
        CommDebugMode comm;
        train_and_compare(net, reference, [&](MultiForward& each, int step) {
          comm.clear();
          return each(random_batch(step, {32, 4}).set_requires_grad(needs_grad)).sum();
        });
        EXPECT_EQ(comm.count("reduce_scatter"), 2);
      }
    }
  });
}

TEST(Calls, UnusedOutputsAndUnusedModules) {
  run_ranks(4, [](int) {
    for (const ReshardAfterForward& reshard :
         {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
      SCOPED_TRACE_OF(reshard);
      auto [net, reference] = twins<DoubleLinear>(24);
      fully_shard(net->lin1, {.reshard_after_forward = reshard});
      fully_shard(net, {.reshard_after_forward = reshard});
      train_and_compare(
          net, reference,
          [](DoubleLinear& each, int step) {
            const auto outputs = each(random_batch(step, {2, 24}));
            return step < 3 ? (outputs[0] * outputs[1]).sum() : outputs[0].sum();
          },
          6);

      auto [half, expected] = twins<DoubleLinear>(24, false);
      fully_shard(half->lin1, {.reshard_after_forward = reshard});
      fully_shard(half->lin2, {.reshard_after_forward = reshard});
      fully_shard(half, {.reshard_after_forward = reshard});
      train_and_compare(half, expected, [](DoubleLinear& each, int step) {
        return each(random_batch(step, {2, 24}))[0].sum();
      });
      EXPECT_FALSE(half->lin2->weight.grad().defined());
    }
  });
}

TEST(Calls, UnusedParametersMayBeReducedAsZeros) {
  run_ranks(2, [](int rank) {
    auto [net, reference] = twins<DoubleLinear>(8);
    auto root = fully_shard(net);
    root.set_reduce_scatter_unused_params(true);
    // Each rank uses another output.
    const auto loss_of = [&](DoubleLinear& each) {
      return each(random_batch(0, {2, 8}))[rank].sum();
    };
    loss_of(net).backward();
    loss_of(reference).backward();
    for (const auto& param : reference->parameters()) {
      if (!param.grad().defined()) {
        param.mutable_grad() = torch::zeros_like(param);
      }
    }
    average_gradients(*reference);
    expect_parity(*net, *reference);
  });
}

struct NoInputsImpl : torch::nn::Module {
  NoInputsImpl() : weight(register_parameter("weight", torch::randn({4, 4}))) {}
  torch::Tensor forward() {
    return weight.matmul(weight);
  }
  torch::Tensor weight;
};
FSDP_MODULE(NoInputs);

TEST(Calls, NoInputsAtAll) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<NoInputs>();
    fully_shard(net);
    EXPECT_EQ(net().sizes(), (std::vector<int64_t>{4, 4}));
    train_and_compare(net, reference, [](NoInputs& each, int) { return each().sum(); });
  });
}

struct NoParamsImpl : torch::nn::Module {
  std::pair<torch::Tensor, std::vector<torch::Tensor>> forward(
      const torch::Tensor& x, const std::tuple<torch::Tensor, torch::Tensor>& ys) {
    return {x * 2, {std::get<0>(ys), std::get<1>(ys)}};
  }
};
FSDP_MODULE(NoParams);

TEST(Calls, ModulesWithoutParameters) {
  run_ranks(2, [](int) {
    NoParams net;
    auto handle = fully_shard(net);
    const auto x = torch::ones({2}, torch::requires_grad());
    const auto [y, rest] = net(x, std::tuple(x * 3, x * 4));
    (y + rest[0] + rest[1]).sum().backward();
    EXPECT_SAME(x.grad(), torch::full({2}, 9.0));
    auto gather = handle.unshard(/*async_op=*/true);
    gather->wait();
    handle.reshard();
    EXPECT_TRUE(handle.is_unsharded());
  });
}

struct Activations {
  torch::Tensor a;
  torch::Tensor constant;
};

} // namespace
} // namespace fsdp

FSDP_TREE(fsdp::Activations, a, constant);

namespace fsdp {
namespace {

template <class Container>
struct WrapImpl;
template <>
struct WrapImpl<std::vector<torch::Tensor>> {
  static std::vector<torch::Tensor> wrap(torch::Tensor x) {
    return {std::move(x)};
  }
  static torch::Tensor& of(std::vector<torch::Tensor>& x) {
    return x[0];
  }
};
template <>
struct WrapImpl<std::map<std::string, torch::Tensor>> {
  static std::map<std::string, torch::Tensor> wrap(torch::Tensor x) {
    return {{"x", std::move(x)}};
  }
  static torch::Tensor& of(std::map<std::string, torch::Tensor>& x) {
    return x.at("x");
  }
};
template <>
struct WrapImpl<std::tuple<int, torch::Tensor>> {
  static std::tuple<int, torch::Tensor> wrap(torch::Tensor x) {
    return {7, std::move(x)};
  }
  static torch::Tensor& of(std::tuple<int, torch::Tensor>& x) {
    EXPECT_EQ(std::get<0>(x), 7);
    return std::get<1>(x);
  }
};
template <>
struct WrapImpl<Activations> {
  static Activations wrap(torch::Tensor x) {
    return {std::move(x), torch::ones({2})};
  }
  static torch::Tensor& of(Activations& x) {
    EXPECT_SAME(x.constant, torch::ones({2}));
    return x.a;
  }
};

template <class C>
struct ContainedImpl : torch::nn::Module {
  ContainedImpl() : lin(register_module("lin", linear(8, 8))) {}
  C forward(C x) {
    return WrapImpl<C>::wrap(torch::relu(lin(WrapImpl<C>::of(x))));
  }
  Linear lin;
};
template <class C>
struct ContainersImpl : torch::nn::Module {
  ContainersImpl() {
    for (int i = 0; i < 3; ++i) {
      parts.push_back(this->register_module(
          std::to_string(i),
          Holder<ContainedImpl<C>>(std::make_shared<Hooked<ContainedImpl<C>>>())));
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto wrapped = WrapImpl<C>::wrap(x);
    for (auto& part : parts) {
      wrapped = part(wrapped);
    }
    return WrapImpl<C>::of(wrapped);
  }
  std::vector<Holder<ContainedImpl<C>>> parts;
};

TEST(Calls, ActivationsInContainersAndStructs) {
  const auto train = []<class C>(C) {
    run_ranks(2, [](int) {
      struct Make : Holder<ContainersImpl<C>> {
        Make() : Holder<ContainersImpl<C>>(std::make_shared<Hooked<ContainersImpl<C>>>()) {}
      };
      auto [net, reference] = twins<Make>();
      for (auto& part : net->parts) {
        fully_shard(part);
      }
      fully_shard(net);
      CommDebugMode comm;
      train_and_compare(net, reference, [&](Make& each, int step) {
        comm.clear();
        return each(random_batch(step, {2, 8})).sum();
      });
      EXPECT_EQ(comm.count("reduce_scatter"), 3);
    });
  };
  train(std::vector<torch::Tensor>());
  train(std::map<std::string, torch::Tensor>());
  train(std::tuple<int, torch::Tensor>());
  train(Activations());
}

// ------------------------------------------------------------ Other ways to call

struct VisionImpl : torch::nn::Module {
  VisionImpl() : patch_proj(register_module("patch_proj", linear(12, 16))) {}
  torch::Tensor forward_features(const torch::Tensor& x) {
    return torch::relu(patch_proj(x));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return forward_features(x).sum(1);
  }
  Linear patch_proj;
};
FSDP_MODULE(Vision);

struct VisionModelImpl : torch::nn::Module {
  VisionModelImpl()
      : vit(register_module("vit", Vision())),
        projector(register_module("projector", linear(16, 4))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const auto features = call_method(vit, &VisionImpl::forward_features, x);
    return projector(features);
  }
  Vision vit;
  Linear projector;
};
FSDP_MODULE(VisionModel);

TEST(Calls, AnyMethodBetweenTheHooks) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<VisionModel>();
    fully_shard(net->vit);
    fully_shard(net->projector);
    fully_shard(net);
    train_and_compare(net, reference, [](VisionModel& each, int step) {
      return each(random_batch(step, {4, 3, 12})).sum();
    });
    const auto sum = call_method(
        net->vit, [](VisionImpl& vit, const torch::Tensor& x) { return vit.forward(x).sum(); },
        random_batch(0, {4, 3, 12}));
    EXPECT_TRUE(sum.requires_grad());
    EXPECT_EQ(net->vit->patch_proj->weight.size(0), 8); // resharded
  });
}

struct ForeignImpl : torch::nn::Module {
  ForeignImpl() : lin(register_module("lin", torch::nn::Linear(6, 6))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::relu(call(lin, x));
  }
  torch::nn::Linear lin; // not hooked
};
FSDP_MODULE(Foreign);

TEST(Calls, ModulesThatCannotBeHookedAreShardedByCall) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Foreign>();
    fully_shard(by_call(net->lin));
    EXPECT_TRUE(is_fsdp_module(net->lin));
    fully_shard(net);
    CommDebugMode comm;
    train_and_compare(net, reference, [&](Foreign& each, int step) {
      comm.clear();
      return each(random_batch(step, {4, 6})).sum();
    });
    EXPECT_EQ(comm.count("reduce_scatter"), 1);
  });
}

} // namespace
} // namespace fsdp
