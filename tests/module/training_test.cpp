// Everything that a sharded model can be made of, trained next to the unsharded
// one: every parameter and gradient on every rank.
#include <fsdp/call.h>
#include <fsdp/debug.h>
#include <fsdp/tie_weights.h>

#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

std::optional<ShardPlacement> largest_dim(const std::string&, const torch::Tensor& param) {
  int64_t best = 0;
  for (int64_t dim = 1; dim < param.dim(); ++dim) {
    best = param.size(dim) > param.size(best) ? dim : best;
  }
  return Shard{best};
}

struct TwoLinearsImpl : torch::nn::Module {
  TwoLinearsImpl(int64_t in, int64_t hidden, int64_t out)
      : first(register_module("0", linear(in, hidden))),
        second(register_module("2", linear(hidden, out))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return second(torch::relu(first(x)));
  }
  Linear first, second;
};
FSDP_MODULE(TwoLinears);

// ------------------------------------------------------------ Sharding

TEST(Training, OneGroupOfUnevenShapes) {
  for (const int n : {1, 2, 3, 4, 8}) {
    run_ranks(n, [](int) {
      for (const auto& [in, hidden, out] :
           std::vector<std::tuple<int, int, int>>{{16, 15, 8}, {7, 15, 3}, {16, 17, 8}}) {
        SCOPED_TRACE_OF(in, hidden, out);
        auto [net, reference] = twins<TwoLinears>(in, hidden, out);
        fully_shard(net);
        train_and_compare(net, reference, [in = in](TwoLinears& each, int step) {
          return each(random_batch(step, {4, in})).sum();
        });
      }
    });
  }
}

TEST(Training, ShardsAlongTheLargestDim) {
  run_ranks(4, [](int) {
    auto [net, reference] = twins<TwoLinears>(32, 16, 8);
    fully_shard(net, {.shard_placement_fn = largest_dim});
    EXPECT_EQ(net->first->weight.sizes(), (std::vector<int64_t>{16, 8}));
    train_and_compare(net, reference, [](TwoLinears& each, int step) {
      return each(random_batch(step, {4, 32})).sum();
    });
    auto [transformer, expected] = twins<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0});
    shard_transformer(transformer, {.shard_placement_fn = largest_dim});
    train_and_compare(transformer, expected, transformer_loss);
  });
}

TEST(Training, ShardsOfAnyDimAreContiguousAndSoAreTheirGradients) {
  struct CheckedImpl : MLPImpl {
    using MLPImpl::MLPImpl;
    torch::Tensor forward(const torch::Tensor& x) {
      for (const auto& param : parameters()) {
        EXPECT_TRUE(param.is_contiguous());
      }
      return MLPImpl::forward(x);
    }
  };
  run_ranks(4, [](int) {
    auto net = seeded<Holder<CheckedImpl>>(4);
    fully_shard(net, {.shard_placement_fn = [](const std::string&, const torch::Tensor& param) {
                  return Shard{param.dim() > 1 ? -1 : 0};
                }});
    net(random_batch(0, {2, 4})).sum().backward();
    for (const auto& param : net->parameters()) {
      EXPECT_TRUE(param.is_contiguous());
      EXPECT_TRUE(param.grad().is_contiguous());
      EXPECT_EQ(param.grad().sizes(), param.sizes());
    }
  });
}

TEST(Training, EveryReshardOfATransformer) {
  for (const int n : {1, 2, 3, 4}) {
    run_ranks(n, [&](int) {
      for (const ReshardAfterForward& reshard :
           {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(),
            ReshardAfterForward(n % 2 == 0 ? 2 : n)}) {
        SCOPED_TRACE_OF(reshard);
        auto [net, reference] = twins<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0});
        shard_transformer(net, {.reshard_after_forward = reshard});
        train_and_compare(net, reference, transformer_loss, 3);
      }
    });
  }
}

TEST(Training, PlacementFunctionsMayGiveMeshesOfTheirOwn) {
  run_ranks(4, [](int) {
    auto [net, reference] = twins<MLP>(6);
    const auto mesh = init_device_mesh(test_device(), {4}, {"dp"});
    const auto pairs = init_device_mesh(test_device(), {2, 2}, {"a", "b"})["b"];
    fully_shard(
        net, {.mesh = mesh,
              .shard_placement_fn = [&](const std::string& name,
                                        const torch::Tensor&) -> std::optional<ShardPlacement> {
                return name == "in_proj.weight" ? std::optional(ShardPlacement{0, pairs})
                                                : std::nullopt;
              }});
    EXPECT_EQ(as_dtensor(net->in_proj->weight).device_mesh().size(), 2);
    EXPECT_EQ(as_dtensor(net->in_proj->bias).device_mesh().size(), 4);
    // The same batch everywhere: then it does not matter over whom is averaged.
    train_and_compare(net, reference, [](MLP& each, int step) {
      return each(torch::randn({4, 6}, generator(step)).to(test_device())).sum();
    });
    EXPECT_THROW(FSDPModule::of(net).set_custom_all_gather(nullptr), c10::ValueError);
  });
}

TEST(Training, SharedParametersAreOneAtAllTheirSites) {
  for (const int n : {2, 3, 4}) {
    run_ranks(n, [](int) {
      for (const bool reshard : {true, false}) {
        SCOPED_TRACE_OF(reshard);
        auto [net, reference] = twins<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0});
        shard_transformer(net, {.reshard_after_forward = reshard});
        EXPECT_TRUE(net->output->weight.is_same(net->tok_embeddings->weight));
        train_and_compare(net, reference, transformer_loss);
      }
    });
  }
}

struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(int64_t vocab)
      : tok_embeddings(register_module("tok_embeddings", Embedding(vocab, 16))),
        output(register_module("output", linear(16, vocab, false))) {
    tie_weights(output, tok_embeddings);
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    return output(tok_embeddings(tokens));
  }
  Embedding tok_embeddings;
  Linear output;
};
FSDP_MODULE(Tied);

TEST(Training, TiedModulesInOneUnevenGroup) {
  for (const int n : {2, 4}) {
    run_ranks(n, [n](int) {
      for (const bool reshard : {true, false}) {
        SCOPED_TRACE_OF(reshard);
        const int64_t vocab = 4 * n + 1;
        auto [net, reference] = twins<Tied>(vocab);
        auto group =
            fully_shard({net->tok_embeddings, net->output}, {.reshard_after_forward = reshard});
        fully_shard(net, {.reshard_after_forward = reshard});
        EXPECT_TRUE(net->output->weight.is_same(net->output->named_parameters()["weight"]));
        group.unshard(); // before any forward
        EXPECT_SAME(net->output->weight.detach(), reference->output->weight.detach());
        group.reshard();
        const auto initial = reference->output->weight.detach().clone();
        train_and_compare(
            net, reference,
            [vocab](Tied& each, int step) {
              const auto tokens = random_tokens(step, {2, 8}, vocab);
              return torch::nn::functional::cross_entropy(
                  each(tokens).flatten(0, 1), tokens.flatten());
            },
            10);
        group.unshard();
        EXPECT_TRUE((net->output->weight.detach() != initial).any(1).all().item<bool>());
      }
    });
  }
}

TEST(Training, AGroupOfEmptyParameters) {
  struct EmptyImpl : torch::nn::Module {
    EmptyImpl() : nothing(register_parameter("nothing", torch::empty({0, 3}))) {}
    torch::Tensor forward(const torch::Tensor& x) {
      return x * 2 + nothing.sum();
    }
    torch::Tensor nothing;
  };
  run_ranks(2, [](int) {
    Holder<EmptyImpl> net(std::make_shared<Hooked<EmptyImpl>>());
    fully_shard(net);
    net(torch::ones({2})).sum().backward();
    EXPECT_EQ(net->nothing.grad().sizes(), net->nothing.sizes());
  });
}

TEST(Training, GradientsFromBeforeShardingAreGone) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Stack>(4);
    net(random_batch(7, {2, 4})).sum().backward();
    fully_shard(net);
    for (const auto& param : net->parameters()) {
      EXPECT_FALSE(param.grad().defined());
    }
    train_and_compare(net, reference, [](Stack& each, int step) {
      return each(random_batch(step, {2, 4})).sum();
    });
  });
}

TEST(Training, LayersMadeShardedAndDestroyedOneByOne) {
  run_ranks(2, [](int) {
    for (int i = 0; i < 8; ++i) {
      auto gone = seeded<MLP>(4); // its addresses come again
      fully_shard(gone);
    }
    auto [net, reference] = twins<Stack>(4);
    for (auto& mlp : net->mlps) {
      fully_shard(mlp);
    }
    fully_shard(net);
    train_and_compare(net, reference, [](Stack& each, int step) {
      return each(random_batch(step, {2, 4})).sum();
    });
  });
}

// ------------------------------------------------------------ Prefetch, unshard, events

TEST(Training, ExplicitPrefetchingBothWays) {
  run_ranks(4, [](int) {
    auto [net, reference] = twins<Transformer>(ModelArgs{.n_layers = 8, .dropout_p = 0});
    shard_transformer(net);
    const auto block = [&](size_t i) { return FSDPModule::of(net->blocks[i]); };
    for (size_t i = 0; i < 8; ++i) {
      if (i < 6) {
        block(i).set_modules_to_forward_prefetch({block(i + 1), block(i + 2)});
      }
      if (i >= 2) {
        block(i).set_modules_to_backward_prefetch({block(i - 1), block(i - 2)});
      }
    }
    train_and_compare(net, reference, transformer_loss, 4);
  });
}

TEST(Training, PostOptimEventsAreUsedOnce) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Stack>(8);
    auto root = fully_shard(net);
    train_and_compare(net, reference, [&](Stack& each, int step) {
      c10::Event event(test_device());
      if (test_device() != c10::kCPU) {
        event.record(test_stream());
      }
      root.set_post_optim_event(std::move(event));
      return each(random_batch(step, {2, 8})).sum();
    });
  });
}

struct AsyncImpl : torch::nn::Module {
  AsyncImpl() {
    for (int i = 0; i < 3; ++i) {
      weights.push_back(register_parameter("weight" + std::to_string(i), torch::randn({8, 8})));
      mlps.push_back(register_module("mlp" + std::to_string(i), MLP(8)));
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor sum;
    std::vector<torch::Tensor> ys;
    for (size_t i = 0; i < 3; ++i) {
      ys.push_back(torch::relu(x.matmul(weights[i])));
      if (is_fsdp_module(mlps[i])) {
        (void)FSDPModule::of(mlps[i]).unshard(/*async_op=*/true); // its forward waits
      }
    }
    for (size_t i = 0; i < 3; ++i) {
      const auto y = mlps[i](ys[i]);
      sum = sum.defined() ? sum + y : y;
    }
    return sum;
  }
  std::vector<torch::Tensor> weights;
  std::vector<MLP> mlps;
};
FSDP_MODULE(Async);

TEST(Training, UnshardAsyncInsideForwardBeforeLazyInit) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Async>();
    for (auto& mlp : net->mlps) {
      fully_shard(mlp, {.reshard_after_forward = false}); // roots of their own
    }
    // What is left is replicated by hand.
    torch::optim::Adam sharded_optimizer(net->parameters(), 1e-2);
    torch::optim::Adam optimizer(reference->parameters(), 1e-2);
    for (int step = 0; step < 5; ++step) {
      auto loss = net(random_batch(step, {2, 8})).sum();
      auto expected = reference(random_batch(step, {2, 8})).sum();
      EXPECT_TRUE(near(loss.detach(), expected.detach(), 1e-5));
      loss.backward();
      expected.backward();
      for (const auto& weight : net->weights) {
        default_group().all_reduce(weight.grad(), ReduceOp::Avg);
      }
      average_gradients(*reference);
      expect_parity(*net, *reference);
      sharded_optimizer.step();
      optimizer.step();
      sharded_optimizer.zero_grad();
      optimizer.zero_grad();
    }
  });
}

TEST(Training, UnshardBeforeAnyForward) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<MLP>(4);
    auto handle = fully_shard(net);
    handle.unshard();
    const auto expected = reference->named_parameters();
    for (const auto& item : net->named_parameters()) {
      EXPECT_SAME(item.value().detach(), expected[item.key()].detach());
    }
    handle.reshard();
    train_and_compare(
        net, reference, [](MLP& each, int step) { return each(random_batch(step, {2, 4})).sum(); });
  });
}

TEST(Training, WhatParametersShowAfterForwardAndBackward) {
  run_ranks(4, [](int) {
    const auto is_whole = [](const torch::Tensor& param) {
      return param.sizes() == as_dtensor(param).sizes();
    };
    for (const auto& [reshard, kept] : std::vector<std::pair<ReshardAfterForward, bool>>{
             {true, false}, {false, true}, {2, false}, {std::nullopt, true}}) {
      SCOPED_TRACE_OF(reshard);
      auto [net, reference] = twins<MLP>(3);
      auto root = fully_shard(net, {.reshard_after_forward = reshard});
      const auto expect = [&](bool whole) {
        const auto full = reference->named_parameters();
        for (const auto& item : net->named_parameters()) {
          EXPECT_EQ(is_whole(item.value()), whole) << item.key();
          EXPECT_SAME(as_dtensor(item.value()).full_tensor(), full[item.key()].detach());
        }
        EXPECT_EQ(root.is_unsharded(), whole);
      };
      expect(false);
      auto y = net(random_batch(0, {2, 3}));
      expect(kept);
      root.reshard();
      expect(false);
      y.sum().backward();
      expect(false);
      y = net(random_batch(0, {2, 3}));
      y.sum().backward();
      expect(false);
    }
  });
}

TEST(Training, ReshardIsOfOneModuleAlone) {
  run_ranks(4, [](int) {
    for (const auto& [reshard, kept, root_kept] :
         std::vector<std::tuple<ReshardAfterForward, bool, bool>>{
             {true, false, false},
             {false, true, true},
             {2, false, false},
             {std::nullopt, false, true}}) {
      SCOPED_TRACE_OF(reshard);
      auto net = seeded<Stack>(3, 2);
      auto in_proj = fully_shard(net->mlps[0]->in_proj, {.reshard_after_forward = reshard});
      auto out_proj = fully_shard(net->mlps[0]->out_proj, {.reshard_after_forward = reshard});
      auto root = fully_shard(net, {.reshard_after_forward = reshard});
      const auto expect = [&](bool in, bool out, bool rest) {
        EXPECT_EQ(in_proj.is_unsharded(), in);
        EXPECT_EQ(net->mlps[0]->in_proj->weight.size(0), in ? 12 : 3);
        EXPECT_EQ(out_proj.is_unsharded(), out);
        EXPECT_EQ(root.is_unsharded(), rest);
        EXPECT_EQ(net->mlps[1]->in_proj->weight.size(0), rest ? 12 : 3);
      };
      auto y = net(random_batch(0, {2, 3}));
      expect(kept, kept, root_kept);
      root.reshard();
      expect(kept, kept, false);
      in_proj.reshard();
      expect(false, kept, false);
      y.sum().backward();
      expect(false, false, false);
    }
  });
}

TEST(Training, EveryGatherAsyncByHand) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Transformer>(ModelArgs{.dropout_p = 0});
    shard_transformer(net, {.reshard_after_forward = true});
    train_and_compare(net, reference, [&](Transformer& each, int step) {
      if (is_fsdp_module(each)) {
        (void)FSDPModule::of(each).unshard(/*async_op=*/true);
        for (auto& block : each->blocks) {
          (void)FSDPModule::of(block).unshard(/*async_op=*/true);
        }
      }
      return transformer_loss(each, step);
    });
  });
}

TEST(Training, ShardsAreTheChunksOfEachParameter) {
  run_ranks(2, [](int rank) {
    auto [net, reference] = twins<Stack>(3); // nothing divides
    const auto grid = init_device_mesh(test_device(), {1, 2}, {"pp", "dp"});
    fully_shard(net, {.mesh = grid["dp"]}); // a slice
    const auto whole = reference->named_parameters();
    for (const auto& item : net->named_parameters()) {
      const auto spread = as_dtensor(item.value());
      EXPECT_EQ(spread.placements(), (std::vector<Placement>{Shard{0}}));
      EXPECT_EQ(spread.device_mesh(), grid["dp"]);
      EXPECT_EQ(spread.sizes(), whole[item.key()].sizes());
      EXPECT_SAME(spread.to_local(), whole[item.key()].detach().chunk(2, 0)[rank].contiguous());
    }
  });
}

struct SameModuleTwiceImpl : torch::nn::Module {
  SameModuleTwiceImpl() : first(register_module("first", linear(6, 6))), second(first) {
    register_module("second", second); // the same module at two places
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return second(torch::relu(first(x)));
  }
  Linear first, second;
};
FSDP_MODULE(SameModuleTwice);

TEST(Training, OneModuleAtTwoPlaces) {
  for (const bool alone : {false, true}) {
    run_ranks(3, [alone](int) {
      SCOPED_TRACE_OF(alone);
      auto [net, reference] = twins<SameModuleTwice>();
      if (alone) {
        fully_shard(net->first);
      }
      fully_shard(net);
      CommDebugMode comm;
      train_and_compare(net, reference, [&](SameModuleTwice& each, int step) {
        comm.clear();
        return each(random_batch(step, {2, 6})).sum();
      });
      EXPECT_EQ(comm.count("reduce_scatter"), 1);
    });
  }
}

TEST(Training, UnshardInBackwardCanBeSwitchedOff) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Transformer>(ModelArgs{.dropout_p = 0, .weight_tying = false});
    auto embeddings = fully_shard({net->tok_embeddings, net->pos_embeddings});
    embeddings.set_unshard_in_backward(false);
    fully_shard({net->norm, net->output});
    shard_transformer(net);
    CommDebugMode comm;
    train_and_compare(
        net, reference,
        [&](Transformer& each, int step) {
          auto loss = transformer_loss(each, step);
          comm.clear();
          return loss;
        },
        3);
    comm.clear();
    transformer_loss(net, 0).backward();
    EXPECT_EQ(comm.count("all_gather"), 4 + 3); // not the embeddings' in backward
    EXPECT_EQ(comm.count("reduce_scatter"), 4);
  });
}

} // namespace
} // namespace fsdp
