// How often groups are gathered and reduced: the numbers of FSDP2's own tests.
#include <fsdp/debug.h>

#include "state/order_fixture.h"

namespace fsdp {
namespace {

using namespace test;
using Lines = std::vector<std::string>;

TEST(Counts, PerForwardAndBackward) {
  run_ranks(4, [](int) {
    for (const auto& [reshard, name] : kReshards) {
      SCOPED_TRACE(name);
      auto net = make_transformer(2, reshard); // 3 groups
      CommDebugMode comm;
      auto loss = loss_of(net);
      EXPECT_EQ(comm.count("all_gather"), 3);
      EXPECT_EQ(comm.total(), 3);
      comm.clear();
      loss.backward();
      const int gathers = name == "false" ? 0 : name == "auto" ? 2 : 3;
      EXPECT_EQ(comm.count("all_gather"), gathers);
      EXPECT_EQ(comm.count("reduce_scatter"), 3);
      EXPECT_EQ(comm.total(), gathers + 3);
    }
  });
}

TEST(Counts, AreByModuleAndInBytes) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(4); // 4*16 + 16 and 16*4 + 4 elements
    fully_shard(net->in_proj);
    fully_shard(net->out_proj);
    fully_shard(net);
    CommDebugMode comm;
    net(random_batch(0, {2, 4})).sum().backward();
    // in_proj and out_proj twice, since the root has nothing
    EXPECT_EQ(comm.bytes("all_gather"), 2 * 4 * (80 + 68));
    EXPECT_EQ(comm.bytes("reduce_scatter"), 4 * (80 + 68));
    std::vector<std::string> modules;
    for (const auto& call : comm.calls()) {
      modules.push_back(call.op + " " + call.module);
    }
    EXPECT_EQ(
        modules, (Lines{
                     "all_gather in_proj", "all_gather out_proj", "all_gather out_proj",
                     "all_gather in_proj", "reduce_scatter out_proj", "reduce_scatter in_proj"}));
  });
}

TEST(Counts, ManualReshardAfterForwardsThatKeep) {
  run_ranks(2, [](int) {
    auto net = make_transformer(2, false);
    auto loss = loss_of(net);
    for (auto& block : net->blocks) {
      FSDPModule::of(block).reshard();
    }
    FSDPModule::of(net).reshard();
    CommDebugMode comm;
    loss.backward();
    EXPECT_EQ(comm.count("all_gather"), 3);
    EXPECT_EQ(comm.count("reduce_scatter"), 3);
  });
}

TEST(Counts, SetReshardAfterForward) {
  run_ranks(2, [](int) {
    const auto gathers = [](std::optional<bool> set, bool recurse) {
      auto net =
          make_transformer(2, set ? ReshardAfterForward(!*set) : ReshardAfterForward(std::nullopt));
      if (set) {
        FSDPModule::of(net).set_reshard_after_forward(*set, recurse);
      }
      auto loss = loss_of(net);
      CommDebugMode comm;
      loss.backward();
      EXPECT_EQ(comm.count("reduce_scatter"), 3);
      return comm.count("all_gather");
    };
    EXPECT_EQ(gathers(true, true), 3);
    EXPECT_EQ(gathers(true, false), 1);
    EXPECT_EQ(gathers(false, true), 0);
    EXPECT_EQ(gathers(false, false), 2);
    EXPECT_EQ(gathers({}, true), 2);
  });
}

struct LinearThenMLPsImpl : torch::nn::Module {
  LinearThenMLPsImpl() : first(register_module("0", linear(32, 32))) {
    for (int i = 1; i <= 3; ++i) {
      mlps.push_back(register_module(std::to_string(i), MLP(32)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    x = first(x);
    for (auto& mlp : mlps) {
      x = mlp(x);
    }
    return x;
  }
  Linear first;
  std::vector<MLP> mlps;
};
FSDP_MODULE(LinearThenMLPs);

struct Accumulation {
  std::string mode; // whose flags are set
  ReshardAfterForward reshard;
  bool reshard_after_backward;
  int gathers;
  int reductions;
};

TEST(Counts, GradientAccumulation) {
  const std::vector<Accumulation> cases{
      {"all", true, true, 24, 4},          {"all", 2, true, 24, 4},
      {"all", false, true, 12, 4},         {"all", false, false, 4, 4},
      {"some_mlps", true, true, 24, 8},    {"some_mlps", 2, true, 24, 8},
      {"some_mlps", false, true, 12, 8},   {"root_only", true, true, 24, 10},
      {"root_only", 2, true, 24, 10},      {"root_only", false, true, 12, 10},
      {"root_only", false, false, 10, 10},
  };
  const auto loss_of_batch = [](LinearThenMLPs& net, int batch) {
    return net(random_batch(batch, {2, 32})).sum();
  };
  run_ranks(4, [&](int) {
    for (const auto& each : cases) {
      SCOPED_TRACE(each.mode);
      auto [net, reference] = twins<LinearThenMLPs>();
      for (auto& mlp : net->mlps) {
        fully_shard(mlp, {.reshard_after_forward = each.reshard});
      }
      auto root = fully_shard(net, {.reshard_after_forward = each.reshard});
      torch::optim::Adam sharded_optimizer(net->parameters(), 1e-2);
      torch::optim::Adam optimizer(reference->parameters(), 1e-2);
      for (int step = 0; step < 3; ++step) {
        CommDebugMode comm;
        for (int microbatch = 0; microbatch < 3; ++microbatch) {
          const bool last = microbatch == 2;
          std::vector<FSDPModule> flagged{root};
          if (each.mode == "some_mlps") {
            flagged = {FSDPModule::of(net->mlps[0]), FSDPModule::of(net->mlps[1])};
          }
          const bool recurse = each.mode != "root_only";
          for (auto& module : flagged) {
            module.set_requires_gradient_sync(last, recurse);
            if (!each.reshard_after_backward) {
              module.set_reshard_after_backward(last, recurse);
            }
          }
          compare_backward(net, reference, loss_of_batch, 10 * step + microbatch);
        }
        EXPECT_EQ(comm.count("all_gather"), each.gathers);
        EXPECT_EQ(comm.count("reduce_scatter"), each.reductions);
        compare_and_step(net, reference, sharded_optimizer, optimizer, step % 2 == 1);
      }
    }
  });
}

TEST(Counts, OneForwardOneBackwardMicrobatching) {
  run_ranks(2, [](int) {
    for (const bool unshard_first : {false, true}) {
      for (const bool reshard_after_backward : {false, true}) {
        SCOPED_TRACE_OF(unshard_first, reshard_after_backward);
        auto net = make_transformer(2, false);
        auto reference = seeded<Transformer>(ModelArgs{.dropout_p = 0});
        torch::optim::AdamW sharded_optimizer(unique_parameters(*net), 1e-2);
        torch::optim::AdamW optimizer(unique_parameters(*reference), 1e-2);
        std::vector<int> gathers;
        CommDebugMode comm;
        if (unshard_first) {
          for (auto& block : net->blocks) {
            (void)FSDPModule::of(block).unshard(/*async_op=*/true);
          }
          (void)FSDPModule::of(net).unshard(/*async_op=*/true);
        }
        gathers.push_back(comm.count("all_gather"));
        for (int microbatch = 0; microbatch < 3; ++microbatch) {
          const bool last = microbatch == 2;
          auto root = FSDPModule::of(net);
          root.set_requires_gradient_sync(last);
          root.set_is_last_backward(last);
          if (!reshard_after_backward) {
            root.set_reshard_after_backward(last);
          }
          comm.clear();
          auto loss = loss_of(net, microbatch);
          loss.backward();
          gathers.push_back(comm.count("all_gather"));
          EXPECT_EQ(comm.count("reduce_scatter"), last ? 3 : 0);
          auto expected = loss_of(reference, microbatch);
          EXPECT_TRUE(near(loss.detach(), expected.detach(), 1e-5));
          expected.backward();
        }
        EXPECT_EQ(
            gathers, (std::vector<int>{
                         unshard_first ? 3 : 0, unshard_first ? 0 : 3,
                         reshard_after_backward ? 3 : 0, reshard_after_backward ? 3 : 0}));
        average_gradients(*reference);
        expect_parity(*net, *reference);
        sharded_optimizer.step();
        optimizer.step();
        expect_parity(*net, *reference);
      }
    }
  });
}

TEST(Counts, NoneForOneRank) {
  run_ranks(1, [](int) {
    auto net = make_transformer(2, true);
    auto reference = seeded<Transformer>(ModelArgs{.dropout_p = 0});
    CommDebugMode comm;
    train_and_compare(net, reference, loss_of);
    EXPECT_EQ(comm.count("all_gather") + comm.count("reduce_scatter"), 0);
  });
}

} // namespace
} // namespace fsdp
