// Selective activation checkpointing: what a policy keeps does not run again, and a budget holds.
#include <fsdp/memory.h>

#include "state/save_policies.h"

namespace fsdp {
namespace {

using namespace test;
using torch::Tensor;

void checkpoint_blocks(Transformer& net, const ActivationCheckpointOptions& options) {
  apply_activation_checkpointing(
      net,
      [](const std::string&, torch::nn::Module& module) {
        return module.as<TransformerBlock>() != nullptr;
      },
      options);
}

// ------------------------------------------------------------ Parity

TEST(SavePolicy, GradientsAreThoseWithoutCheckpointing) {
  run_ranks(1, [](int) {
    for (const auto& [name, make] : kPolicies) {
      for (const double dropout : {0.0, 0.3}) {
        SCOPED_TRACE_OF(name, dropout);
        const ModelArgs args{.n_layers = 3, .dropout_p = dropout};
        auto net = seeded<Transformer>(args);
        auto reference = seeded<Transformer>(args);
        checkpoint_blocks(net, saving(make()));
        for (int step = 0; step < 3; ++step) {
          const auto run = [&](Transformer& each) {
            torch::manual_seed(100 + step);
            transformer_loss(each, step).backward();
            return torch::rand({1}).item<float>(); // what comes after is the same, too
          };
          EXPECT_EQ(run(net), run(reference));
          const auto of = net->named_parameters();
          for (const auto& item : reference->named_parameters()) {
            EXPECT_TRUE(torch::equal(of[item.key()].grad(), item.value().grad())) << item.key();
          }
        }
      }
    }
  });
}

TEST(SavePolicy, ShardedModules) {
  for (const int n : {1, 2, 4}) {
    run_ranks(n, [n](int) {
      for (const auto& [name, make] : kPolicies) {
        for (const auto& reshard : reshards(n)) {
          SCOPED_TRACE_OF(name, reshard);
          const ModelArgs args{.n_layers = 3, .dropout_p = 0};
          auto net = seeded<Transformer>(args);
          auto reference = seeded<Transformer>(args);
          checkpoint_blocks(net, saving(make()));
          shard_transformer(net, {.reshard_after_forward = reshard});
          train_and_compare(net, reference, transformer_loss, 3);
        }
      }
    });
  }
}

TEST(SavePolicy, DropoutOfRanksThatAreThreads) {
  run_ranks(2, [](int) {
    for (const auto& [name, make] : kPolicies) {
      SCOPED_TRACE(name);
      auto net = seeded<Transformer>(ModelArgs{.n_layers = 2, .dropout_p = 0.3});
      // Two backwards through one forward: the masks must be those of forward in both.
      checkpoint_blocks(net, saving(make()));
      shard_transformer(net);
      const auto loss = transformer_loss(net, 0);
      loss.backward({}, /*retain_graph=*/true);
      std::map<std::string, Tensor> first;
      for (auto& item : net->named_parameters()) {
        if (item.value().grad().defined()) { // a rank may have no part of a small parameter
          first[item.key()] = item.value().grad().clone();
          item.value().mutable_grad().reset();
        }
      }
      EXPECT_FALSE(first.empty());
      loss.backward();
      for (const auto& [key, grad] : first) {
        EXPECT_SAME(net->named_parameters()[key].grad(), grad);
      }
    }
  });
}

// ------------------------------------------------------------ What runs again

TEST(SavePolicy, WhatIsKeptDoesNotRunAgain) {
  const std::vector<Tensor> of{leaf({5, 4}, 1), leaf({4, 8}, 2), leaf({8, 4}, 3)};
  const auto again = [&](const std::shared_ptr<SavePolicy>& policy) {
    const auto counting = std::make_shared<Counting>(policy);
    const auto run = [&] {
      return checkpoint(saving(counting), feed_forward, of[0], of[1], of[2]);
    };
    expect_same(
        gradients(of, run), gradients(of, [&] { return feed_forward(of[0], of[1], of[2]); }));
    EXPECT_EQ(counting->live, 0);
    return counting->again;
  };
  using Again = std::map<std::string, int>;
  EXPECT_EQ(again(save_matmuls()), (Again{{"aten::gelu", 1}, {"aten::tanh", 1}}));
  EXPECT_EQ(again(save_operators({"aten::gelu"})), (Again{{"aten::mm", 2}, {"aten::tanh", 1}}));
  EXPECT_EQ(again(std::make_shared<SaveAll>()), Again{});
  EXPECT_EQ(again(save_within(0)), (Again{{"aten::mm", 2}, {"aten::gelu", 1}, {"aten::tanh", 1}}));
}

TEST(SavePolicy, AResultThatWasWrittenToRunsAgain) {
  const std::vector<Tensor> of{leaf({5, 4}, 1), leaf({4, 8}, 2)};
  const auto function = [](const Tensor& x, const Tensor& weight) {
    auto product = x.mm(weight);
    product.add_(1);
    return product.sin();
  };
  const auto counting = std::make_shared<Counting>(std::make_shared<SaveAll>());
  const auto result = checkpoint(saving(counting), function, of[0], of[1]);
  const auto grad = [&](const Tensor& of_result, bool retain) {
    return torch::autograd::grad({of_result.sum()}, of, {}, retain);
  };
  const auto expected = grad(function(of[0], of[1]), false);
  expect_same(grad(result, true), expected);
  expect_same(grad(result, false), expected);
  EXPECT_EQ(counting->again.at("aten::mm"), 2);
}

TEST(SavePolicy, SeveralBackwards) {
  const std::vector<Tensor> of{leaf({5, 4}, 1), leaf({4, 8}, 2), leaf({8, 4}, 3)};
  const auto counting = std::make_shared<Counting>(save_matmuls());
  const auto expected = gradients(of, [&] { return feed_forward(of[0], of[1], of[2]); });
  const auto sum = checkpoint(saving(counting), feed_forward, of[0], of[1], of[2]).sum();
  for (const bool retain : {true, true, false}) {
    expect_same(torch::autograd::grad({sum}, of, {}, retain), expected);
  }
  EXPECT_FALSE(counting->again.contains("aten::mm"));
  EXPECT_EQ(counting->live, 0);
  { // A graph that no backward goes through.
    const auto unused = checkpoint(saving(counting), feed_forward, of[0], of[1], of[2]);
    EXPECT_GT(counting->live, 0);
  }
  EXPECT_EQ(counting->live, 0);
}

// ------------------------------------------------------------ Memory

TEST(SavePolicy, ABudgetHoldsAndIsUsed) {
  run_ranks(1, [](int) {
    const ModelArgs args{.n_layers = 4, .dropout_p = 0};
    double last = -1;
    for (const int64_t budget : {0, 5000, 10000, 20000, 40000, 1 << 20}) {
      SCOPED_TRACE(budget);
      auto net = seeded<Transformer>(args);
      const auto counting = std::make_shared<Counting>(save_within(budget));
      checkpoint_blocks(net, saving(counting));
      for (int step = 0; step < 4; ++step) {
        counting->flops_saved = 0;
        counting->again.clear();
        const auto loss = transformer_loss(net, step);
        if (step == 0) {
          EXPECT_EQ(counting->flops_saved, 0) << "nothing is known in the first step";
        }
        loss.backward();
        EXPECT_EQ(counting->live, 0);
      }
      EXPECT_LE(counting->most, budget);
      EXPECT_GE(counting->flops_saved, last) << "more memory saves more arithmetic";
      last = counting->flops_saved;
      EXPECT_EQ(counting->again.contains("aten::mm"), budget < (1 << 20));
    }
    EXPECT_GT(last, 0);
  });
}

TEST(SavePolicy, ABudgetFollowsWhatAStepNeeds) {
  const Tensors of{leaf({64, 8}, 1), leaf({8, 8}, 2)};
  const auto three = [](const Tensor& x, const Tensor& weight) {
    return x.mm(weight).sin().mm(weight).sin().mm(weight).sin();
  };
  const int64_t all = 3 * 64 * 8 * 4;
  const auto policy = std::make_shared<Counting>(save_within(all));
  const auto step = [&](int64_t rows, int backwards = 1) {
    policy->again.clear();
    const auto sum = checkpoint(saving(policy), three, of[0].narrow(0, 0, rows), of[1]).sum();
    for (int i = 1; i <= backwards; ++i) {
      torch::autograd::grad({sum}, of, {}, /*retain_graph=*/i < backwards);
    }
    return policy->again["aten::mm"];
  };
  EXPECT_EQ(step(64, 3), 9); // the first step learns, also if backward runs several times
  EXPECT_EQ(step(64), 0);
  EXPECT_EQ(step(40), 0); // a shorter batch
  EXPECT_EQ(step(64), 0);
  EXPECT_EQ(step(8), 0);
  EXPECT_EQ(step(64), 0);
  EXPECT_EQ(policy->most, all);
}

TEST(SavePolicy, ABudgetIsNotSpentOnWhatIsWrittenTo) {
  const Tensors of{leaf({64, 8}, 1), leaf({8, 8}, 2)};
  const auto written = [](const Tensor& x, const Tensor& weight) {
    return x.mm(weight).relu_().mm(weight).sin();
  };
  const auto policy = std::make_shared<Counting>(save_within(64 * 8 * 4)); // for one of two
  for (int step = 0; step < 4; ++step) {
    policy->again.clear();
    torch::autograd::grad({checkpoint(saving(policy), written, of[0], of[1]).sum()}, of);
  }
  EXPECT_EQ(policy->again["aten::mm"], 1);
  EXPECT_EQ(policy->live, 0);
  // What was written to is not held until backward.
  const auto matmuls = std::make_shared<Counting>(save_matmuls());
  const auto result = checkpoint(saving(matmuls), written, of[0], of[1]);
  EXPECT_EQ(matmuls->live, 64 * 8 * 4);
}

TEST(SavePolicy, PeakLiesBetweenFullAndNone) {
  if (test_device() != c10::kCPU) {
    GTEST_SKIP() << "an allocator that caches does not tell what is needed";
  }
  const ModelArgs args{.n_layers = 6, .max_seq_len = 64, .dim = 64, .dropout_p = 0};
  const auto peak = [&](const std::optional<ActivationCheckpointOptions>& options) {
    auto net = seeded<Transformer>(args);
    if (options) {
      checkpoint_blocks(net, *options);
    }
    const auto tokens = torch::randint(args.vocab_size, {8, args.max_seq_len});
    for (int step = 0; step < 2; ++step) { // a budget learns in the first step
      reset_peak_memory_stats(c10::kCPU);
      net(tokens).sum().backward();
    }
    return memory_stats(c10::kCPU).peak;
  };
  (void)memory_stats(c10::kCPU); // counting begins
  const auto none = peak(std::nullopt);
  const auto full = peak(ActivationCheckpointOptions{});
  const auto matmuls = peak(saving(save_matmuls()));
  EXPECT_LT(full, matmuls);
  EXPECT_LT(matmuls, none);
  const int64_t budget = (matmuls - full) / 2;
  const auto within = peak(saving(save_within(budget)));
  EXPECT_GT(within, full + budget / 2);
  EXPECT_LE(within, full + budget);
}

// ------------------------------------------------------------ Errors

TEST(SavePolicy, NamesThatCannotBeSaved) {
  const auto refused = [](const auto& make, const std::string& part) {
    EXPECT_TRUE(contains(message_of<c10::ValueError>(make), part)) << part;
  };
  refused([] { save_operators({"aten::mm", "mm"}); }, "there is no operator 'mm'");
  refused([] { save_operators({"aten::linear"}); }, "aten::linear has no results to keep");
  for (const char* name :
       {"aten::add_", "aten::view", "aten::_to_copy", "aten::native_dropout", "aten::rand",
        "c10d::allreduce_"}) {
    refused([=] { save_operators({name}); }, std::string(name) + " has no results to keep");
  }
  refused([] { save_within(-1); }, "a budget of -1 bytes is negative");
}

TEST(SavePolicy, APolicyThatThrows) {
  struct Throws : SavePolicy {
    bool save(const RanOperator& ran) override {
      TORCH_CHECK(false, "no policy for ", ran.name);
    }
  };
  const auto x = leaf({4, 4});
  const auto exp = [](const Tensor& t) { return t.exp(); };
  const auto message =
      message_of<c10::Error>([&] { checkpoint(saving(std::make_shared<Throws>()), exp, x); });
  EXPECT_TRUE(contains(message, "no policy for aten::exp")) << message;
  EXPECT_SAME(x.exp().exp(), x.exp().exp()); // nothing is left behind
}

} // namespace
} // namespace fsdp
