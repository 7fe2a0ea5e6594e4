// Selective activation checkpointing: gradients are those without checkpointing, to the bit, and
// what a policy keeps does not run again.
#include <ATen/autocast_mode.h>
#include <fsdp/memory.h>

#include <map>
#include <set>

#include "module/gradients.h"
#include "state/order_fixture.h"

namespace fsdp {
namespace {

using namespace test;
using torch::Tensor;

/// Asks another policy, and counts what happens.
class Counting : public SavePolicy {
 public:
  explicit Counting(std::shared_ptr<SavePolicy> inner) : inner_(std::move(inner)) {}
  bool save(const RanOperator& ran) override {
    const bool saved = inner_->save(ran);
    if (saved) {
      live += ran.bytes();
      most = std::max(most, live);
      flops_saved += ran.flops();
    }
    return saved;
  }
  void released(int64_t bytes) override {
    live -= bytes;
    inner_->released(bytes);
  }
  void recomputed(const RanOperator& ran) override {
    ++again[ran.name];
    inner_->recomputed(ran);
  }

  int64_t live = 0;
  int64_t most = 0;
  double flops_saved = 0;
  std::map<std::string, int> again; // how often each operator ran in recomputations

 private:
  const std::shared_ptr<SavePolicy> inner_;
};

class SaveAll : public SavePolicy {
 public:
  bool save(const RanOperator&) override {
    return true;
  }
};

/// Every second result, whatever the operator: a policy with a state of its own.
class SaveEverySecond : public SavePolicy {
 public:
  bool save(const RanOperator&) override {
    return ++asked_ % 2 == 0;
  }

 private:
  int asked_ = 0;
};

using MakePolicy = std::function<std::shared_ptr<SavePolicy>()>;
const std::map<std::string, MakePolicy> kPolicies{
    {"matmuls", save_matmuls},
    {"all", [] { return std::make_shared<SaveAll>(); }},
    {"every second", [] { return std::make_shared<SaveEverySecond>(); }},
    {"by name", [] { return save_operators({"aten::mm", "aten::relu", "aten::gelu"}); }},
    {"no byte", [] { return save_within(0); }},
    {"some bytes", [] { return save_within(20000); }},
    {"many bytes", [] { return save_within(1 << 30); }}};

ActivationCheckpointOptions saving(std::shared_ptr<SavePolicy> policy) {
  return {.save = std::move(policy)};
}

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

Tensor feed_forward(const Tensor& x, const Tensor& up, const Tensor& down) {
  return torch::gelu(x.mm(up)).mm(down).tanh();
}

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

/// Expects the gradients of `function(of...)` in two backwards of a checkpointed call, with every
/// policy. Nothing that was returned may change.
template <class Function>
void expect_right(const std::vector<Tensor>& of, Function function) {
  torch::manual_seed(5);
  const auto plain = function(of);
  const auto expected = torch::autograd::grad({plain.sum()}, of);
  for (const auto& [name, make] : kPolicies) {
    for (const bool early_stop : {true, false}) {
      SCOPED_TRACE_OF(name, early_stop);
      const auto counting = std::make_shared<Counting>(make());
      for (int step = 0; step < 2; ++step) { // a budget begins with the second one
        torch::manual_seed(5);
        const auto result = checkpoint({.early_stop = early_stop, .save = counting}, function, of);
        const auto sum = result.sum();
        expect_same(torch::autograd::grad({sum}, of, {}, /*retain_graph=*/true), expected);
        expect_same(torch::autograd::grad({sum}, of), expected);
        EXPECT_SAME(result, plain);
      }
      EXPECT_EQ(counting->live, 0);
    }
  }
}

using Tensors = std::vector<Tensor>;

// A product of tensors with three axes ends with aten::_unsafe_view, whose version is its own.
TEST(SavePolicy, WritesToWhatSharesMemoryWithAResult) {
  const Tensors of{leaf({2, 3, 4}, 1), leaf({4, 4}, 2)};
  expect_right(of, [](const Tensors& t) {
    auto product = torch::matmul(t[0], t[1]);
    product.add_(1);
    return product.square();
  });
  expect_right(of, [](const Tensors& t) { return torch::linear(t[0], t[1]).mul_(0.5).exp_(); });
  expect_right(of, [](const Tensors& t) {
    auto scores = torch::matmul(t[0], t[0].transpose(1, 2));
    scores.div_(2);
    scores.masked_fill_(torch::ones({3, 3}, scores.options().dtype(torch::kBool)).triu(1), -1e9);
    return torch::matmul(scores.softmax(-1), torch::matmul(t[0], t[1]));
  });
  expect_right(of, [](const Tensors& t) {
    auto parts = torch::unsafe_chunk(t[0][0].mm(t[1]), 2, 1);
    parts[0].add_(1);
    return parts[0].sin() * parts[1];
  });
  expect_right(of, [](const Tensors& t) { // a write through a name of a name
    const auto product = t[0][0].mm(t[1]);
    const auto once = at::_unsafe_view(product, {4, 3});
    auto twice = at::_unsafe_view(once, {2, 6});
    const auto before = once * 2;
    twice.add_(1);
    return before.sum() + once.clone().sum() + twice.sin().sum();
  });
  expect_right(of, [](const Tensors& t) { // a write to the first name
    auto product = t[0][0].mm(t[1]);
    const auto other = at::_unsafe_view(product, {4, 3});
    const auto before = other * 3;
    product.add_(1);
    return before.sin().sum() + product.exp().sum();
  });
  const Tensors attention{leaf({1, 2, 3, 4}, 1), leaf({3, 3}, 2)};
  expect_right(attention, [](const Tensors& t) {
    return torch::scaled_dot_product_attention(t[0], t[0], t[0], t[1]).sin();
  });
  torch::nn::GRU gru(torch::nn::GRUOptions(4, 5).batch_first(true));
  gru->to(test_device());
  expect_right(
      {of[0]}, [gru](const Tensors& t) mutable { return std::get<0>(gru->forward(t[0])).exp(); });
}

TEST(SavePolicy, OperatorsInsideOfOperators) {
  expect_right({leaf({4, 4})}, [](const Tensors& t) {
    return std::get<0>(torch::native_dropout(t[0], 0.3, true)).sin().exp();
  });
  expect_right({leaf({4, 4})}, [](const Tensors& t) {
    return torch::dropout(t[0].mm(t[0]), 0.5, true).mm(t[0]).sin();
  });
}

TEST(SavePolicy, WhatAutogradDoesNotRecordMayRunOnce) {
  const Tensors of{leaf({4, 4}, 1), leaf({4, 4}, 2)};
  const auto cache = std::make_shared<Tensor>();
  expect_right(of, [cache](const Tensors& t) {
    if (!cache->defined()) {
      const torch::NoGradGuard no_grad;
      *cache = torch::full({4, 4}, 2.f, t[0].options()).mm(torch::ones({4, 4}, t[0].options()));
    }
    const auto result = (t[0].mm(t[1]) * *cache).sin();
    cache->reset(); // so that the next forward fills it again
    return result;
  });
  const auto lazy = [first = std::make_shared<bool>(true)](const Tensors& t) {
    if (std::exchange(*first, false)) {
      const c10::InferenceMode inference;
      t[0].detach().mm(t[1].detach());
    }
    return t[0].mm(t[1]).sin();
  };
  expect_right(of, lazy);
}

TEST(SavePolicy, ResultsThatAreNotDense) {
  if (test_device() == c10::kCPU) {
    expect_right({leaf({4, 4})}, [](const Tensors& t) {
      return t[0].sin().to_sparse().to_dense().mm(t[0]);
    });
  }
  expect_right({leaf({4, 4})}, [](const Tensors& t) {
    return torch::real(torch::complex(t[0].sin(), t[0].exp()).conj() * 2).mm(t[0]);
  });
  expect_right({leaf({4, 4})}, [](const Tensors& t) {
    return t[0].mm(t[0]).to(torch::kBFloat16).exp().to(torch::kFloat);
  });
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

// ------------------------------------------------------------ Surroundings

struct Doubled : torch::autograd::Function<Doubled> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    const auto result = x.mm(x.t());
    context->save_for_backward({x});
    return result;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list grads) {
    const auto x = context->get_saved_variables()[0];
    return {(grads[0] + grads[0].t()).mm(x)};
  }
};

TEST(SavePolicy, FunctionsWithABackwardOfTheirOwn) {
  const std::vector<Tensor> of{leaf({4, 4})};
  const auto function = [](const Tensor& x) { return Doubled::apply(x.sin()).mm(x).exp(); };
  for (const auto& [name, make] : kPolicies) {
    SCOPED_TRACE(name);
    expect_same(
        gradients(of, [&] { return checkpoint(saving(make()), function, of[0]); }),
        gradients(of, [&] { return function(of[0]); }));
  }
}

TEST(SavePolicy, Autocast) {
  const std::vector<Tensor> of{leaf({5, 4}, 1), leaf({4, 8}, 2), leaf({8, 4}, 3)};
  const auto type = test_device();
  const bool before = at::autocast::is_autocast_enabled(type);
  const auto run = [&](const std::shared_ptr<SavePolicy>& policy) {
    return gradients(of, [&] {
      at::autocast::set_autocast_enabled(type, true);
      const auto result = policy ? checkpoint(saving(policy), feed_forward, of[0], of[1], of[2])
                                 : feed_forward(of[0], of[1], of[2]);
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(type, before);
      return result;
    });
  };
  for (const auto& [name, make] : kPolicies) {
    SCOPED_TRACE(name);
    const auto counting = std::make_shared<Counting>(make());
    expect_same(run(counting), run(nullptr));
    EXPECT_EQ(
        counting->again.contains("aten::mm"),
        name.ends_with("byte") || name.ends_with("bytes") || name == "every second")
        << name;
  }
}

TEST(SavePolicy, CallsInCalls) {
  const std::vector<Tensor> of{leaf({4, 4}, 1), leaf({4, 4}, 2)};
  for (const auto& [outer, make_outer] : kPolicies) {
    for (const auto& [inner, make_inner] : kPolicies) {
      SCOPED_TRACE_OF(outer, inner);
      const auto function = [](bool nested, const std::shared_ptr<SavePolicy>& policy) {
        return [nested, policy](const Tensor& x, const Tensor& weight) {
          const auto part = [](const Tensor& a, const Tensor& b) { return a.mm(b).sin().mm(b); };
          const auto once =
              nested ? checkpoint(saving(policy), part, x.exp(), weight) : part(x.exp(), weight);
          return once.mm(weight).tanh();
        };
      };
      expect_same(
          gradients(
              of,
              [&, nested = function(true, make_inner())] {
                return checkpoint(saving(make_outer()), nested, of[0], of[1]);
              }),
          gradients(of, [&] { return function(false, nullptr)(of[0], of[1]); }));
    }
  }
}

TEST(SavePolicy, OperatorsWithSeveralResults) {
  const std::vector<Tensor> of{leaf({2, 4, 6}, 1), leaf({6}, 2), leaf({6}, 3)};
  const auto function = [](const Tensor& x, const Tensor& weight, const Tensor& bias) {
    const auto parts = torch::unsafe_chunk(torch::layer_norm(x.sin(), {6}, weight, bias), 2, 1);
    return torch::stack({parts[0].exp(), parts[1].cos()}).logsumexp(-1);
  };
  for (const auto& [name, make] : kPolicies) {
    SCOPED_TRACE(name);
    expect_same(
        gradients(of, [&] { return checkpoint(saving(make()), function, of[0], of[1], of[2]); }),
        gradients(of, [&] { return function(of[0], of[1], of[2]); }));
  }
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
