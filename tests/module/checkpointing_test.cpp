// Activation checkpointing by itself: what is dropped, made again and repeated.
// Python's non-reentrant form is the measure.
#include <ATen/autocast_mode.h>
#include <fsdp/activation_checkpointing.h>
#include <fsdp/memory.h>

#include <thread>

#include "module/gradients.h"

namespace fsdp {
namespace {

using namespace test;
using torch::Tensor;
using Names = std::vector<std::string>;

// ------------------------------------------------------------ What can be called

Tensor twice_tanh(const Tensor& x) {
  return x.tanh().tanh();
}

TEST(RecomputedCalls, ModulesAndFunctions) {
  const auto x = leaf({3, 4});
  MLP hooked(4);
  torch::nn::Linear plain(4, 4);
  torch::nn::Sequential sequence(torch::nn::Linear(4, 5), torch::nn::Tanh());
  const auto pointer = std::make_shared<MLP::Impl>(4);
  const auto check = [&](const torch::nn::Module& module, auto with, auto without) {
    auto of = module.parameters();
    of.push_back(x);
    expect_same(gradients(of, with), gradients(of, without));
  };
  check(*hooked, [&] { return checkpoint(hooked, x); }, [&] { return hooked(x); });
  check(*plain, [&] { return checkpoint(plain, x); }, [&] { return plain(x); });
  check(*sequence, [&] { return checkpoint(sequence, x); }, [&] { return sequence->forward(x); });
  check(*pointer, [&] { return checkpoint(pointer, x); }, [&] { return pointer->forward(x); });
  check(*hooked, [&] { return checkpoint(twice_tanh, x); }, [&] { return twice_tanh(x); });
  check(
      *hooked, [&] { return checkpoint([](Tensor t) { return t.exp().sin(); }, x); },
      [&] { return x.exp().sin(); });
  // Where there is nothing to save.
  torch::NoGradGuard no_grad;
  EXPECT_SAME(checkpoint(hooked, x), hooked(x));
}

struct Pieces {
  std::optional<Tensor> sum;
  std::map<std::string, Tensor> named;
  int64_t count = 0;
};

} // namespace
} // namespace fsdp

FSDP_TREE(fsdp::Pieces, sum, named, count);

namespace fsdp {
namespace {

/// Everything in and everything out, by value, const&, && and &.
Pieces mix(
    std::vector<Tensor> list,
    const std::unordered_map<int, Tensor>& numbered,
    std::pair<Tensor, double>&& scaled,
    std::string label,
    const Tensor& unused,
    Pieces& written) {
  Tensor sum = scaled.first.sin() * scaled.second;
  for (auto& each : list) {
    sum = sum + each.exp();
    each = Tensor();
  }
  for (const auto& [number, each] : numbered) {
    sum = sum * each.cos().pow(number);
  }
  EXPECT_FALSE(unused.defined());
  written.named[label] = sum.tanh();
  written.count += 1;
  return {sum.sin(), {{label, sum.cos()}}, static_cast<int64_t>(list.size())};
}

TEST(RecomputedCalls, ArgumentsAndResultsOfEveryType) {
  const std::vector<Tensor> of{leaf({3}, 1), leaf({3}, 2), leaf({3}, 3), leaf({3}, 4)};
  const auto constant = torch::randn({3}, generator(5)).to(test_device()); // needs no gradient
  const auto run = [&](bool checkpointed) {
    std::vector<Tensor> list{of[0], constant};
    const std::unordered_map<int, Tensor> numbered{{1, of[1]}, {2, of[2]}};
    Pieces written{.sum = {}, .named = {{"before", of[0]}}, .count = 3};
    const auto result =
        checkpointed
            ? checkpoint(mix, list, numbered, std::pair(of[3], 2.0), "label", Tensor(), written)
            : mix(list, numbered, std::pair(of[3], 2.0), "label", {}, written);
    EXPECT_TRUE(list[0].defined());
    EXPECT_EQ(result.count, 2);
    EXPECT_EQ(written.count, 4);
    return *result.sum + result.named.at("label") * written.named.at("label");
  };
  expect_same(gradients(of, [&] { return run(true); }), gradients(of, [&] { return run(false); }));

  int calls = 0;
  const auto none = [&calls](int a, const char* b) { calls += a + (b[0] == 'x'); };
  checkpoint(none, 1, "x");
  EXPECT_EQ(calls, 2);
  static_assert(std::is_void_v<decltype(checkpoint(none, 1, "x"))>);
  static_assert(!detail::can_repeat<std::unique_ptr<int>>);
  static_assert(!detail::can_repeat<Tensor, at::IntArrayRef>);
  static_assert(!detail::can_repeat<torch::nn::Module&>);
}

// ------------------------------------------------------------ When it is called

TEST(RecomputedCalls, RunsOnceMoreForEachBackward) {
  const auto x = leaf({4});
  int calls = 0;
  const auto function = [&calls](const Tensor& t) {
    ++calls;
    return std::pair(t.sin(), t.exp());
  };
  const auto [a, b] = checkpoint(function, x);
  EXPECT_EQ(calls, 1);
  a.sum().backward({}, /*retain_graph=*/true);
  EXPECT_EQ(calls, 2);
  (a + b).sum().backward();
  EXPECT_EQ(calls, 3);
  EXPECT_CLOSE(x.grad(), (2 * x.cos() + x.exp()).detach());
  EXPECT_THROW(a.sum().backward(), c10::Error); // of the graph, not of ours
  EXPECT_EQ(calls, 3);
  {
    torch::NoGradGuard no_grad;
    checkpoint(function, x);
  }
  EXPECT_EQ(calls, 4);
  checkpoint(function, x.detach()); // nothing to save
  EXPECT_EQ(calls, 5);
}

TEST(RecomputedCalls, StopsEarlyUnlessTold) {
  const auto x = leaf({4});
  for (const bool early : {true, false}) {
    SCOPED_TRACE_OF(early);
    int ends = 0;
    const auto y = checkpoint(
        {.early_stop = early},
        [&ends](const Tensor& t) {
          const auto result = t.sin().exp() + 1; // saves no more after exp
          ++ends;
          return result;
        },
        x);
    y.sum().backward();
    EXPECT_EQ(ends, early ? 1 : 2);
  }
}

struct CarelessImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) noexcept {
    return x.sin().exp();
  }
};
FSDP_MODULE(Careless);

TEST(RecomputedCalls, AStopPassesWhatHandlesErrorsAndSparesWhatIsNoexcept) {
  const auto x = leaf({4});
  Careless careless;
  const auto swallows = [](const Tensor& t) {
    Tensor inner;
    try {
      try {
        inner = t.exp();
      } catch (const std::exception&) {
        ADD_FAILURE() << "no error, and none to be handled";
      }
    } catch (...) { // a user may catch everything
    }
    return inner.defined() ? inner : t;
  };
  const auto check = [&](auto function, const Tensor& expected) {
    expect_same(gradients({x}, [&] { return checkpoint(function, x); }), gradients({x}, [&] {
                  return expected;
                }));
  };
  check(swallows, x.exp());
  check([&](const Tensor& t) { return careless(t) + 1; }, x.sin().exp());
}

TEST(RecomputedCallsDeathTest, AFunctionThatIsNoexceptMayBeCheckpointed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const auto x = torch::ones({3}).requires_grad_();
        const auto f = [](const torch::Tensor& t) noexcept { return t.exp().sin(); };
        checkpoint(f, x).sum().backward();
        std::_Exit(0);
      },
      testing::ExitedWithCode(0), "");
}

TEST(RecomputedCalls, NestedOnesRunAsOftenAsInPython) {
  Names calls;
  const auto run = [&calls](bool early, bool save_more, const Tensor& x) {
    const ActivationCheckpointOptions options{.early_stop = early};
    const auto inner = [&calls](const Tensor& t) {
      calls.emplace_back("inner");
      return t.sin().cos();
    };
    const auto middle = [&calls, options, inner, save_more](const Tensor& t) {
      calls.emplace_back("middle");
      const auto z = checkpoint(options, inner, t.exp());
      return save_more ? z.sin() : z + 1;
    };
    const auto outer = [&calls, options, middle](const Tensor& t) {
      calls.emplace_back("outer");
      return checkpoint(options, middle, t.tanh()) * 2;
    };
    return checkpoint(options, outer, x);
  };
  struct Case {
    bool early, save_more;
    Names backward;
  };
  const auto x = leaf({3});
  for (const auto& [early, save_more, backward] : std::vector<Case>{
           {true, false, {"outer", "middle", "inner"}},
           {true, true, {"outer", "middle", "inner", "inner"}},
           {false, false, {"outer", "middle", "inner", "middle", "inner", "inner"}},
           {false, true, {"outer", "middle", "inner", "middle", "inner", "inner"}}}) {
    SCOPED_TRACE_OF(early, save_more);
    calls.clear();
    const auto y = run(early, save_more, x);
    EXPECT_EQ(calls, (Names{"outer", "middle", "inner"}));
    for (const bool retain : {true, false}) {
      SCOPED_TRACE_OF(retain);
      calls.clear();
      const auto grads = torch::autograd::grad({y.sum()}, {x}, {}, retain);
      EXPECT_EQ(calls, backward);
      const auto z = x.tanh().exp().sin().cos();
      expect_same(grads, gradients({x}, [&] { return save_more ? z.sin() * 2 : (z + 1) * 2; }));
    }
  }
}

TEST(RecomputedCalls, BackwardsInsideAndOfBackward) {
  const auto x = leaf({3});
  for (const bool early : {true, false}) {
    SCOPED_TRACE_OF(early);
    int calls = 0;
    const auto with_grad = [&calls](const Tensor& t) {
      ++calls;
      const auto z = t.sin().cos();
      return torch::autograd::grad({z.sum()}, {t}, {}, true, /*create_graph=*/true)[0] + z;
    };
    const auto expected = gradients({x}, [&] { return with_grad(x); });
    calls = 0;
    const auto y = checkpoint({.early_stop = early}, with_grad, x);
    EXPECT_EQ(calls, 2);
    expect_same(gradients({x}, [&] { return y; }), expected);
    EXPECT_EQ(calls, 3);
  }
  const auto twice = [&](const Tensor& y) {
    const auto first = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    return gradients({x}, [&] { return first.pow(2); });
  };
  expect_same(twice(checkpoint(twice_tanh, x)), twice(twice_tanh(x)));
}

// ------------------------------------------------------------ What is repeated

TEST(RecomputedCalls, DropoutDrawsTheSameAndLeavesTheGeneratorAlone) {
  run_ranks(1, [](int) {
    const auto x = leaf({64});
    const auto noisy = [](const Tensor& t) {
      return torch::dropout(torch::dropout(t.sin(), 0.5, true).exp(), 0.5, true);
    };
    const auto run = [&](bool checkpointed) {
      torch::manual_seed(3);
      const auto y = checkpointed ? checkpoint(noisy, x) : noisy(x);
      const auto between = torch::rand({4});
      const auto grads = gradients({x}, [&] { return y; });
      return std::vector{y.detach(), between, grads[0], torch::rand({4})};
    };
    expect_same(run(true), run(false));
    EXPECT_FALSE(run(true)[2].equal(torch::zeros({64})));

    // Without it, gradients of another mask.
    torch::manual_seed(3);
    const auto y = checkpoint({.preserve_rng_state = false}, noisy, x);
    EXPECT_FALSE(gradients({x}, [&] { return y; })[0].equal(run(false)[2]));
  });
}

TEST(RecomputedCalls, RanksThatAreThreadsDoNotDisturbEachOthersDropout) {
  run_ranks(4, [](int) {
    for (int step = 0; step < 20; ++step) {
      std::vector<Tensor> masks; // of all calls, in order
      const auto inner = [&masks](const Tensor& t) {
        masks.push_back(torch::bernoulli(torch::full({64}, 0.5)));
        return (t * masks.back()).sin();
      };
      const auto outer = [&masks, inner](const Tensor& t) {
        masks.push_back(torch::dropout(torch::ones({64}), 0.5, true));
        const auto y = checkpoint(inner, t * masks.back());
        masks.push_back(torch::rand({64}));
        return (y * masks.back()).exp();
      };
      const auto x = leaf({64});
      checkpoint(outer, x).sum().backward();
      ASSERT_EQ(masks.size(), 3u + 3u + 1u); // both, and the inner one once more
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_SAME(masks[3 + i], masks[i]);
      }
      EXPECT_SAME(masks[6], masks[1]);
      EXPECT_FALSE(masks[1].equal(masks[0]));
    }
  });
}

TEST(RecomputedCalls, AutocastIsOnAgainInBackward) {
  Linear linear(4, 4);
  const auto x = leaf({2, 4});
  const auto run = [&](bool checkpointed) {
    const bool before = at::autocast::is_autocast_enabled(at::kCPU);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
    const auto y = checkpointed ? checkpoint(linear, x.sin()) : linear(x.sin());
    at::autocast::decrement_nesting();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, before);
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    const auto grads = gradients({x, linear->weight}, [&] { return y.to(torch::kFloat); });
    EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCPU), before);
    return grads;
  };
  expect_same(run(true), run(false));
}

// ------------------------------------------------------------ Memory

TEST(RecomputedCalls, SavesMemoryAndGivesAllOfItBack) {
  run_ranks(1, [](int) {
    constexpr int64_t kBytes = 4 * 1024 * 1024;
    memory_stats(torch::kCPU); // begins to count
    const auto x = torch::randn({kBytes / 4}).set_requires_grad(true);
    const auto block = [](Tensor t) {
      for (int i = 0; i < 8; ++i) {
        t = t.sin(); // saves its input
      }
      return t;
    };
    const auto run = [&](bool checkpointed) {
      const auto before = memory_stats(torch::kCPU).allocated;
      {
        Tensor y = x;
        for (int i = 0; i < 4; ++i) {
          y = checkpointed ? checkpoint(block, y) : block(y);
        }
        const auto kept = memory_stats(torch::kCPU).allocated - before;
        EXPECT_EQ(kept / kBytes, checkpointed ? 4 : 32); // and states of the generator
        reset_peak_memory_stats(torch::kCPU);
        torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true);
        // What backward recomputed is gone, although the graph is not.
        EXPECT_EQ(memory_stats(torch::kCPU).allocated - before, kept);
      }
      EXPECT_EQ(memory_stats(torch::kCPU).allocated, before);
      return memory_stats(torch::kCPU).peak - before;
    };
    // 4 inputs, the 8 of one block, and a few gradients; not 32.
    EXPECT_LE(run(true), (4 + 8 + 4) * kBytes);
    EXPECT_GE(run(false), 32 * kBytes);
  });
}

TEST(RecomputedCalls, ItsCalleeAndArgumentsEndWithTheGraph) {
  const auto x = leaf({4});
  auto token = std::make_shared<int>(0);
  const auto function = [token](const Tensor& t, const std::shared_ptr<int>&) {
    return checkpoint([token](const Tensor& u) { return u.exp(); }, t.sin());
  };
  const auto before = token.use_count();
  {
    const auto y = checkpoint(function, x, token);
    EXPECT_GT(token.use_count(), before);
  }
  EXPECT_EQ(token.use_count(), before); // never run
  const auto y = checkpoint(function, x, token);
  y.sum().backward({}, /*retain_graph=*/true);
  EXPECT_GT(token.use_count(), before);
  y.sum().backward();
  EXPECT_EQ(token.use_count(), before); // though the graph's nodes are still there
}

// ------------------------------------------------------------ Threads

TEST(RecomputedCalls, SeveralThreadsThroughOneGraph) {
  const auto x = leaf({64});
  const auto y =
      checkpoint([](const Tensor& t) { return checkpoint(twice_tanh, t.sin()).exp(); }, x);
  const auto expected = gradients({x}, [&] { return twice_tanh(x.sin()).exp(); });
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int step = 0; step < 20; ++step) {
        expect_same(torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true), expected);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

} // namespace
} // namespace fsdp
