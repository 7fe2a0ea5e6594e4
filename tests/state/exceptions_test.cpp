// What is left of an iteration that was broken off, or of a thousand that were
// not; and calls that go around the hooks.
#include <fsdp/comm.h>
#include <fsdp/debug.h>
#include <fsdp/error.h>

#include <fstream>

#include "state/fsdp_state.h"
#include "state/small_net.h"

namespace fsdp {
namespace {

using namespace test;

// ------------------------------------------------------------ Calls around the hooks

TEST(CallsAroundTheHooks, IsCaughtInTheFirstForward) {
  struct AroundImpl : torch::nn::Module {
    AroundImpl() : mlp(register_module("mlp", MLP(4))) {}
    torch::Tensor forward(const torch::Tensor& x) {
      return around ? mlp->as<MLPImpl>()->forward(x) : mlp(x);
    }
    MLP mlp;
    bool around = true;
  };
  struct Around : Holder<AroundImpl> {
    Around() : Holder<AroundImpl>(std::make_shared<Hooked<AroundImpl>>()) {}
  };
  for (const int n : {1, 2}) {
    run_ranks(n, [](int) {
      auto [net, reference] = twins<Around>();
      fully_shard(net->mlp);
      fully_shard(net);
      const auto message = message_of<c10::Error>([&] { net(random_batch(0, {2, 4})); });
      EXPECT_TRUE(contains(message, "'mlp.in_proj.weight' while it is sharded"));
      EXPECT_TRUE(contains(message, "called around the hooks"));
      net->around = false;
      train_and_compare(net, reference, [](Around& each, int step) {
        return each(random_batch(step, {2, 4})).sum();
      });
    });
  }
}

TEST(CallsAroundTheHooks, AProtectedForwardDoesNotCompileOtherwise) {
  struct GuardedImpl : torch::nn::Module {
    GuardedImpl() : lin(register_module("lin", linear(2, 2))) {}
    Linear lin;

   protected:
    torch::Tensor forward(const torch::Tensor& x) {
      return lin(x);
    }
  };
  constexpr auto callable = []<class M>(M*) {
    return requires(M& m, torch::Tensor x) { m.forward(x); };
  };
  static_assert(callable(static_cast<Hooked<GuardedImpl>*>(nullptr)));
  static_assert(!callable(static_cast<GuardedImpl*>(nullptr)));
}

// ------------------------------------------------------------ Exceptions

struct Passes : AllGather {
  Work operator()(torch::Tensor& out, const torch::Tensor& in, ProcessGroup& group, bool) override {
    return group.all_gather_async(out, in);
  }
};

TEST(Exceptions, InForward) {
  run_ranks(2, [](int) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE_OF(reshard);
      auto net = sharded_net(reshard);
      auto reference = seeded<Net>();
      net->fail = true;
      EXPECT_THROW(loss_of(net, 0), c10::Error);
      EXPECT_THROW(loss_of(net, 0), c10::Error);
      net->fail = false;
      train_and_compare(net, reference, loss_of, 2);
      net->fail = true;
      EXPECT_THROW(loss_of(net, 0), c10::Error);
      FSDPModule::of(net).reset_iter_state(); // not needed, and harmless
      FSDPModule::of(net).reset_iter_state();
      net->fail = false;
      train_and_compare(net, reference, loss_of, 2);
    }
  });
}

TEST(Exceptions, InForwardCaughtInside) {
  struct CarefulImpl : torch::nn::Module {
    CarefulImpl() : net(register_module("net", Net())) {}
    torch::Tensor forward(const torch::Tensor& x) {
      try {
        net->fail = true;
        return net(x);
      } catch (const c10::Error&) {
        net->fail = false;
        return net(x);
      }
    }
    Net net;
  };
  struct Careful : Holder<CarefulImpl> {
    Careful() : Holder<CarefulImpl>(std::make_shared<Hooked<CarefulImpl>>()) {}
  };
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Careful>();
    for (auto& mlp : net->net->mlps) {
      fully_shard(mlp);
    }
    fully_shard(net->net);
    fully_shard(net);
    train_and_compare(net, reference, [](Careful& each, int step) {
      return each(random_batch(step, {4, 6})).sum();
    });
  });
}

TEST(Exceptions, InBackwardAndInHooks) {
  run_ranks(2, [](int) {
    for (const bool reshard : {true, false}) {
      SCOPED_TRACE_OF(reshard);
      auto net = sharded_net(reshard);
      auto reference = seeded<Net>();
      const auto fail = [](const torch::Tensor&) -> torch::Tensor {
        TORCH_CHECK(false, "as asked");
      };
      auto input = random_batch(0, {4, 6}).set_requires_grad(true);
      input.register_hook(fail); // at the end
      EXPECT_THROW(net(input).sum().backward(), c10::Error);
      const auto hook = net->mlps[1]->in_proj->weight.register_hook(fail); // in the middle
      EXPECT_THROW(loss_of(net, 0).backward(), c10::Error);
      net->mlps[1]->in_proj->weight.remove_hook(hook);
      auto after = register_post_accumulate_grad_hook(
          net->mlps[2]->in_proj->weight,
          [](const torch::Tensor&) { TORCH_CHECK(false, "as asked"); });
      EXPECT_THROW(loss_of(net, 0).backward(), c10::Error);
      after.remove();
      net->zero_grad(); // what had been reduced by then
      train_and_compare(net, reference, loss_of, 2);
    }
  });
}

TEST(Exceptions, ACollectiveThatFailsNamesTheModule) {
  const auto message = message_of<CommError>([] {
    run_ranks(2, [](int rank) {
      auto net = sharded_net();
      loss_of(net, 0).backward();
      if (rank == 1) {
        net->fail = true; // after mlp0
        EXPECT_THROW(loss_of(net, 1), c10::Error);
        return; // and leaves
      }
      loss_of(net, 1);
    });
  });
  EXPECT_TRUE(contains(message, "all_gather"));
  EXPECT_TRUE(contains(message, "on rank 0"));
  EXPECT_TRUE(contains(message, "for module 'mlp1'"));
}

TEST(Exceptions, InACollective) {
  struct FailsAtTimes : AllGather {
    Work operator()(
        torch::Tensor& out, const torch::Tensor& in, ProcessGroup& group, bool) override {
      TORCH_CHECK(++calls % 3 != 0, "as asked");
      return group.all_gather_async(out, in);
    }
    int calls = 0;
  };
  run_ranks(2, [](int) {
    auto net = sharded_net(true);
    auto reference = seeded<Net>();
    FSDPModule::of(net->mlps[1]).set_custom_all_gather(std::make_shared<FailsAtTimes>());
    int failures = 0;
    for (int attempt = 0; attempt < 6; ++attempt) {
      try {
        loss_of(net, 0).backward();
      } catch (const c10::Error&) {
        ++failures;
      }
    }
    EXPECT_EQ(failures, 3); // some in forward, some in backward
    net->zero_grad();
    FSDPModule::of(net->mlps[1]).set_custom_all_gather(std::make_shared<Passes>());
    train_and_compare(net, reference, loss_of, 2);
  });
}

TEST(Exceptions, ALazyInitThatFailsCanBeTriedAgain) {
  run_ranks(2, [](int) {
    auto net = sharded_net();
    auto reference = seeded<Net>();
    const auto good = net->head->bias.detach().clone();
    net->head->bias.set_data(torch::zeros({7}));
    EXPECT_THROW(loss_of(net, 0), c10::ValueError);
    EXPECT_THROW(loss_of(net, 0), c10::ValueError);
    net->head->bias.set_data(good);
    train_and_compare(net, reference, loss_of, 2);
  });
}

// ------------------------------------------------------------ Nothing grows

/// Resident bytes of this process.
int64_t resident() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, pages = 0;
  statm >> size >> pages;
  return pages * 4096;
}

int num_threads() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind("Threads:", 0) == 0) {
      return std::stoi(line.substr(8));
    }
  }
  return -1;
}

TEST(Growth, NoneOverAThousandSteps) {
  run_ranks(2, [](int) {
    auto net = sharded_net();
    std::vector<torch::Tensor> kept; // losses that a user keeps, with their graphs
    const auto train = [&](int step) {
      auto loss = loss_of(net, step);
      loss.backward();
      if (step % 100 == 0) {
        kept.push_back(loss);
      }
      net->zero_grad();
    };
    const auto recorded = [&] { return net.get()->fsdp_state->comm().num_recorded(); };
    for (int step = 0; step < 100; ++step) {
      train(step);
      loss_of(net, step); // with gradients, but no backward
      torch::NoGradGuard no_grad;
      loss_of(net, step);
    }
    default_group().barrier();
    [[maybe_unused]] const auto bytes = resident();
    const auto threads = num_threads();
    const auto records = recorded();
    for (int step = 0; step < 1000; ++step) {
      train(step);
      loss_of(net, step);
      torch::NoGradGuard no_grad;
      loss_of(net, step);
    }
    default_group().barrier();
#ifndef FSDP_SANITIZED // which keeps what was freed for a while
    EXPECT_LE(resident() - bytes, 4 << 20);
#endif
    EXPECT_LE(num_threads(), threads); // a rank may have ended
    EXPECT_LE(recorded(), records + 4);
    EXPECT_LE(recorded(), 8u);
  });
}

} // namespace
} // namespace fsdp
