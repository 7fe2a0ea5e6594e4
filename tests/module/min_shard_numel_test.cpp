// Small parameters that stay whole on every rank.
#include <fsdp/debug.h>
#include <fsdp/state_dict.h>

#include "module/by_hand.h"
#include "module/meta_fixture.h"
#include "parallel/tp_models.h"

namespace fsdp {
namespace {

using namespace test;

torch::Tensor stack_loss(Stack& net, int step) {
  return net(random_batch(step, {2, net->mlps.front()->in_proj->options.in_features()})).sum();
}

/// One group per MLP, of which the biases are small.
Stack sharded_stack(int64_t min_shard_numel, const ReshardAfterForward& reshard = {}) {
  auto net = seeded<Stack>(8, 3);
  const FullyShardOptions options{
      .reshard_after_forward = reshard, .min_shard_numel = min_shard_numel};
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, options);
  }
  fully_shard(net, options);
  return net;
}

TEST(MinShardNumel, TrainsLikeTheUnshardedModel) {
  for (const int n : {1, 2, 3}) {
    run_ranks(n, [](int) {
      for (const ReshardAfterForward& reshard : {ReshardAfterForward(true), {false}, {}}) {
        SCOPED_TRACE_OF(reshard);
        auto net = sharded_stack(64, reshard);
        auto reference = seeded<Stack>(8, 3);
        train_and_compare(net, reference, stack_loss);
      }
    });
  }
}

TEST(MinShardNumel, KeepsSmallParametersWhole) {
  run_ranks(2, [](int) {
    auto net = sharded_stack(64);
    for (const auto& item : named_dtensors(net)) {
      const auto& whole = item.value();
      const bool is_small = item.key().ends_with("bias");
      EXPECT_EQ(
          whole.placements(),
          std::vector<Placement>{is_small ? Placement(Replicate{}) : Placement(Shard{0})})
          << item.key();
    }
    const auto& mlp = net->mlps[0];
    EXPECT_EQ(mlp->in_proj->bias.sizes(), (std::vector<int64_t>{32}));
    EXPECT_EQ(mlp->in_proj->weight.sizes(), (std::vector<int64_t>{16, 8}));
  });
}

TEST(MinShardNumel, TakesAnAllReduceAndGathersLess) {
  run_ranks(2, [](int) {
    auto net = sharded_stack(64, true);
    stack_loss(net, 0).backward(); // makes what is made once
    CommDebugMode comm;
    stack_loss(net, 1).backward();
    const int64_t weights = 4 * 2 * (32 * 8); // bytes of one MLP's
    EXPECT_EQ(comm.count("all_gather"), 6);
    EXPECT_EQ(comm.bytes("all_gather"), 6 * weights);
    EXPECT_EQ(comm.count("reduce_scatter"), 3);
    EXPECT_EQ(comm.bytes("reduce_scatter"), 3 * weights);
    EXPECT_EQ(comm.count("all_reduce"), 3);
    EXPECT_EQ(comm.bytes("all_reduce"), 3 * 4 * (32 + 8));
  });
}

TEST(MinShardNumel, AllOfThemMayBeSmallOrNone) {
  run_ranks(2, [](int) {
    auto all = sharded_stack(1 << 20, 2);
    CommDebugMode comm;
    stack_loss(all, 0).backward();
    EXPECT_EQ(comm.count("all_gather") + comm.count("reduce_scatter"), 0);
    comm.clear();
    auto none = sharded_stack(1);
    stack_loss(none, 0).backward();
    EXPECT_EQ(comm.count("all_reduce"), 0);
  });
}

TEST(MinShardNumel, APlacementThatIsGivenComesFirst) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(8);
    fully_shard(
        net, {.shard_placement_fn =
                  [](const std::string& name, const torch::Tensor&) {
                    return name == "in_proj.bias" ? std::optional<ShardPlacement>(Shard{0})
                                                  : std::nullopt;
                  },
              .min_shard_numel = 64});
    EXPECT_EQ(net->in_proj->bias.size(0), 16);
    EXPECT_EQ(net->out_proj->bias.size(0), 8);
  });
}

// ------------------------------------------------------------ Precision, and other meshes

TEST(MinShardNumel, ReducesBf16InFp32) {
  for (const int n : {2, 4}) {
    run_ranks(n, [](int) {
      const MixedPrecisionPolicy policy{.param_dtype = kBf16, .reduce_dtype = kFp32};
      for (const bool reshard : {true, false}) {
        SCOPED_TRACE_OF(reshard);
        auto net = seeded<Stack>(16);
        auto reference = by_hand<Stack>(policy, 16);
        const FullyShardOptions options{
            .reshard_after_forward = reshard, .mp_policy = policy, .min_shard_numel = 65};
        for (auto& mlp : net->mlps) {
          fully_shard(mlp, options);
        }
        fully_shard(net, options);
        train_by_hand(net, reference, {4, 16}, kSquares); // every bit of every parameter
        CommDebugMode comm;
        kSquares(net, random_batch(0, {4, 16})).backward();
        EXPECT_EQ(comm.bytes("all_reduce"), 3 * 4 * (64 + 16)); // the biases', in fp32
      }
    });
  }
}

TEST(MinShardNumel, WithReplicas) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 2}, {1, 3}, {3, 1}, {2, 3}}) {
    run_ranks(static_cast<int>(shape[0] * shape[1]), [&](int) {
      const auto mesh = init_device_mesh(test_device(), shape, {"replicate", "shard"});
      SCOPED_TRACE(mesh.str());
      auto [net, reference] = twins<Stack>(8);
      for (auto& mlp : net->mlps) {
        fully_shard(mlp, {.mesh = mesh, .min_shard_numel = 64});
      }
      fully_shard(net, {.mesh = mesh, .min_shard_numel = 64});
      for (const auto& item : named_dtensors(net)) {
        const bool is_small = item.key().ends_with("bias") && shape[1] > 1;
        EXPECT_EQ(
            item.value().placements(),
            (std::vector<Placement>{
                Replicate{}, is_small ? Placement(Replicate{}) : Placement(Shard{0})}))
            << item.key();
      }
      train_and_compare(net, reference, stack_loss);
    });
  }
}

TEST(MinShardNumel, UnderTensorParallelismTheWholeParameterCounts) {
  struct Case {
    std::vector<int64_t> shape;
    std::vector<std::string> names;
    std::optional<DataParallelMeshDims> dims;
  };
  const std::vector<Case> cases{
      {{2, 2}, {"fsdp", "tp"}, std::nullopt},
      {{2, 2, 2}, {"ddp", "fsdp", "tp"}, std::nullopt},
      {{2, 2}, {"fsdp", "tp"}, DataParallelMeshDims{.shard = {"fsdp"}}},
      {{2, 2, 2},
       {"ddp", "fsdp", "tp"},
       DataParallelMeshDims{.shard = {"fsdp"}, .replicate = {"ddp"}}},
      {{2, 2, 2}, {"fsdp", "cp", "tp"}, DataParallelMeshDims{.shard = {"fsdp", "cp"}}}};
  for (const auto& each : cases) {
    const auto axes = static_cast<int64_t>(each.names.size());
    run_ranks(1 << axes, [&](int rank) {
      const auto mesh = init_device_mesh(test_device(), each.shape, each.names);
      SCOPED_TRACE(c10::str(mesh.str(), each.dims ? " by dp_mesh_dims" : ""));
      auto net = in_double<MLPStack>(8);
      auto reference = in_double<MLPStack>(8);
      parallelize(net, mesh["tp"]);
      FullyShardOptions options{.mesh = mesh, .dp_mesh_dims = each.dims};
      if (each.dims) {
        distribute_module(net, mesh);
      } else {
        options.mesh = mesh[std::vector<std::string>(each.names.begin(), each.names.end() - 1)];
      }
      options.min_shard_numel = 150; // weights are of 192 or more, their pieces of 96 or more
      for (auto& mlp : net->mlps) {
        fully_shard(mlp, options);
      }
      fully_shard(net, options);
      for (const auto& item : named_dtensors(net)) {
        const auto placements = item.value().placements();
        const bool is_replicated = std::all_of(
            placements.begin(), placements.end() - 1,
            [](const auto& placement) { return std::holds_alternative<Replicate>(placement); });
        EXPECT_EQ(is_replicated, item.key().ends_with("bias")) << item.key();
      }
      train_and_compare(net, reference, [&](MLPStack& any, int step) {
        return any(tp_batch(step, {8, 8}, rank / 2)).sum();
      });
      const auto wholes = reference->named_parameters();
      for (const auto& item : net->named_parameters()) {
        EXPECT_TRUE(near(as_dtensor(item.value()).full_tensor(), wholes[item.key()].detach(), 1e-5))
            << item.key();
      }
    });
  }
}

// ------------------------------------------------------------ Ranks that begin differently

/// Every rank of the world has the same bits.
void expect_same_everywhere(const torch::Tensor& tensor) {
  auto all = torch::empty({get_world_size() * tensor.numel()}, tensor.options());
  default_group().all_gather(all, tensor.detach().contiguous().view(-1));
  for (const auto& each : all.chunk(get_world_size())) {
    EXPECT_SAME(each.view(tensor.sizes()), tensor.detach());
  }
}

void expect_same_biases(const Stack& net) {
  for (const auto& mlp : net->mlps) {
    expect_same_everywhere(mlp->in_proj->bias);
    expect_same_everywhere(mlp->out_proj->bias);
  }
}

TEST(MinShardNumel, BeginsWithTheValuesOfTheFirstRank) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{4}, {2, 2}}) {
    run_ranks(4, [&](int rank) {
      const auto mesh = shape.size() == 1
                            ? init_device_mesh(test_device(), shape)
                            : init_device_mesh(test_device(), shape, {"replicate", "shard"});
      SCOPED_TRACE(mesh.str());
      auto [net, reference] = twins<Stack>(8);
      {
        torch::NoGradGuard no_grad;
        for (const auto& param : net->parameters()) {
          param.add_(rank);
        }
      }
      CommDebugMode comm;
      for (auto& mlp : net->mlps) {
        fully_shard(mlp, {.mesh = mesh, .min_shard_numel = 64});
      }
      fully_shard(net, {.mesh = mesh, .min_shard_numel = 64});
      EXPECT_EQ(comm.total(), 0);
      {
        torch::NoGradGuard no_grad;
        net(random_batch(0, {4, 8}));
      }
      EXPECT_EQ(comm.count("broadcast"), 3); // one for the biases of a module
      EXPECT_SAME(net->mlps[0]->in_proj->bias.detach(), reference->mlps[0]->in_proj->bias.detach());
      torch::optim::AdamW optimizer(net->parameters(), 1e-2);
      for (int step = 0; step < 2; ++step) {
        stack_loss(net, step).backward();
        optimizer.step();
        optimizer.zero_grad();
        expect_same_biases(net);
      }
    });
  }
}

TEST(MinShardNumel, AlsoOfParametersThatGetTheirValuesLater) {
  run_ranks(2, [](int rank) {
    auto net = on_meta<Stack>(8);
    const auto mesh = init_device_mesh(test_device(), {2});
    CommDebugMode comm;
    for (auto& mlp : net->mlps) {
      fully_shard(mlp, {.mesh = mesh, .min_shard_numel = 64});
    }
    fully_shard(net, {.mesh = mesh, .min_shard_numel = 64});
    EXPECT_EQ(comm.total(), 0);
    to_empty(net, torch::Device(test_device()));
    EXPECT_TRUE(contains(
        message_of<c10::Error>([&] { stack_loss(net, 0); }), "nobody has written to these"));
    EXPECT_EQ(comm.total(), 0); // there was nothing to send
    {
      torch::NoGradGuard no_grad;
      for (const auto& param : net->parameters()) {
        param.fill_(0.1 * (rank + 1));
      }
    }
    stack_loss(net, 0).backward();
    EXPECT_EQ(comm.count("broadcast"), 3);
    stack_loss(net, 1).backward();
    EXPECT_EQ(comm.count("broadcast"), 3);
    expect_same_biases(net);
    EXPECT_SAME(net->mlps[0]->in_proj->bias.detach(), torch::full({32}, 0.1f, test_device()));
  });
}

// A usual way to load: one rank has the values, and the others wait for them on meta.
TEST(MinShardNumel, OnlyTheFirstRankHasValues) {
  run_ranks(2, [](int rank) {
    auto net = rank == 0 ? seeded<Stack>(8) : on_meta<Stack>(8);
    auto reference = seeded<Stack>(8);
    const auto mesh = init_device_mesh(test_device(), {2});
    StateDict whole;
    if (rank == 0) {
      for (const auto& item : reference->named_parameters()) {
        whole.insert(item.key(), item.value().detach().clone());
      }
    }
    for (auto& mlp : net->mlps) {
      fully_shard(mlp, {.mesh = mesh, .min_shard_numel = 64});
    }
    fully_shard(net, {.mesh = mesh, .min_shard_numel = 64});
    if (rank != 0) {
      to_empty(net, torch::Device(test_device()));
    }
    set_model_state_dict(net, whole, {.full_state_dict = true, .broadcast_from_rank0 = true});
    train_and_compare(net, reference, stack_loss);
  });
}

} // namespace
} // namespace fsdp
