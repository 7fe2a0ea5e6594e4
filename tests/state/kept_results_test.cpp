// What selective activation checkpointing keeps is as good as a second run: whatever is written to,
// filled once, random, nested or not dense, gradients are those without checkpointing.
#include <ATen/autocast_mode.h>

#include "state/save_policies.h"

namespace fsdp {
namespace {

using namespace test;
using torch::Tensor;

// ------------------------------------------------------------ Writes

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

// A product of tensors with three axes ends with aten::_unsafe_view, whose version is its own.
TEST(KeptResults, WritesToWhatSharesMemoryWithAResult) {
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

TEST(KeptResults, OperatorsInsideOfOperators) {
  expect_right({leaf({4, 4})}, [](const Tensors& t) {
    return std::get<0>(torch::native_dropout(t[0], 0.3, true)).sin().exp();
  });
  expect_right({leaf({4, 4})}, [](const Tensors& t) {
    return torch::dropout(t[0].mm(t[0]), 0.5, true).mm(t[0]).sin();
  });
}

TEST(KeptResults, WhatAutogradDoesNotRecordMayRunOnce) {
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

TEST(KeptResults, ResultsThatAreNotDense) {
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

TEST(KeptResults, FunctionsWithABackwardOfTheirOwn) {
  const std::vector<Tensor> of{leaf({4, 4})};
  const auto function = [](const Tensor& x) { return Doubled::apply(x.sin()).mm(x).exp(); };
  for (const auto& [name, make] : kPolicies) {
    SCOPED_TRACE(name);
    expect_same(
        gradients(of, [&] { return checkpoint(saving(make()), function, of[0]); }),
        gradients(of, [&] { return function(of[0]); }));
  }
}

TEST(KeptResults, Autocast) {
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

TEST(KeptResults, CallsInCalls) {
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

TEST(KeptResults, OperatorsWithSeveralResults) {
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

} // namespace
} // namespace fsdp
