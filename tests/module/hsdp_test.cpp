// Replicas: of shards (HSDP), and of whole parameters (replicate).
#include <fsdp/activation_checkpointing.h>
#include <fsdp/clip_grad_norm.h>
#include <fsdp/debug.h>
#include <fsdp/memory.h>

#include "support/plain_extension.h"
#include "support/sharded.h"

namespace fsdp::test {
namespace {

DeviceMesh hsdp_mesh(int64_t replicas, int64_t shards) {
  return init_device_mesh(test_device(), {replicas, shards}, {"dp_replicate", "dp_shard"});
}

void shard_stack(Stack& net, const FullyShardOptions& options) {
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, options);
  }
  fully_shard(net, options);
}

torch::Tensor stack_loss(Stack& net, int step) {
  return net(random_batch(step, {2, net->mlps.front()->in_proj->options.in_features()})).sum();
}

/// Every rank of `group` has the same bits.
void expect_same_everywhere(const torch::Tensor& tensor, const ProcessGroup& group) {
  auto all = torch::empty({group.size() * tensor.numel()}, tensor.options());
  group.all_gather(all, tensor.detach().contiguous().view(-1));
  for (const auto& each : all.chunk(group.size())) {
    EXPECT_SAME(each.view(tensor.sizes()), tensor.detach());
  }
}

// ------------------------------------------------------------ HSDP

TEST(Hsdp, TrainsLikeTheUnshardedModel) {
  for (const auto& [replicas, shards] :
       std::vector<std::pair<int, int>>{{2, 2}, {1, 3}, {3, 1}, {2, 4}, {4, 2}}) {
    run_ranks(replicas * shards, [replicas = replicas, shards = shards](int) {
      for (const ReshardAfterForward& reshard :
           std::vector<ReshardAfterForward>{std::nullopt, true, false}) {
        for (const int64_t dim : {3, 16, 17}) {
          SCOPED_TRACE_OF(replicas, shards, reshard, dim);
          auto [net, reference] = twins<Stack>(dim);
          shard_stack(net, {.mesh = hsdp_mesh(replicas, shards), .reshard_after_forward = reshard});
          train_and_compare(net, reference, stack_loss);
        }
      }
    });
  }
}

TEST(Hsdp, TrainsOverAMeshOfGivenGroups) {
  run_ranks(4, [](int) {
    const auto grid = hsdp_mesh(2, 2);
    const auto shards = DeviceMesh::from_groups(test_device(), {grid.get_group(1)}, {"shard"});
    const auto both = DeviceMesh::from_groups(
        test_device(), {grid.get_group(0), grid.get_group(1)}, grid.names(), grid.ranks());
    for (const auto& [given, made] : {std::pair{both, grid}, std::pair{shards, grid["dp_shard"]}}) {
      SCOPED_TRACE(given.str());
      auto [one, other] = twins<Stack>(17);
      shard_stack(one, {.mesh = given});
      shard_stack(other, {.mesh = made});
      const auto loss = stack_loss(one, 0);
      const auto expected = stack_loss(other, 0);
      EXPECT_SAME(loss, expected);
      (loss + expected).backward();
      const auto params = one->parameters();
      for (size_t i = 0; i < params.size(); ++i) {
        const auto twin = other->parameters()[i];
        EXPECT_SAME(params[i].grad(), twin.grad());
        EXPECT_EQ(
            as_dtensor(params[i]).device_mesh().ranks(), as_dtensor(twin).device_mesh().ranks());
      }
    }
  });
}

TEST(Hsdp, ReshardsOverSomeOfTheShards) {
  run_ranks(8, [](int) {
    auto [net, reference] = twins<Stack>(16);
    shard_stack(net, {.mesh = hsdp_mesh(2, 4), .reshard_after_forward = 2});
    train_and_compare(net, reference, stack_loss);
  });
}

TEST(Hsdp, Checkpointed) {
  run_ranks(4, [](int) {
    for (const bool offload : {false, true}) {
      SCOPED_TRACE_OF(offload);
      auto [net, reference] = twins<Stack>(17);
      for (auto& mlp : net->mlps) {
        apply_activation_checkpointing(mlp);
      }
      FullyShardOptions options{.mesh = hsdp_mesh(2, 2)};
      if (offload) {
        options.offload_policy = CPUOffloadPolicy{};
      }
      shard_stack(net, options);
      train_and_compare(net, reference, stack_loss);
    }
  });
}

TEST(Hsdp, MoreInputBuffersChangeNoNumber) {
  run_ranks(4, [](int) {
    std::vector<std::vector<torch::Tensor>> grads;
    for (const int buffers : {1, 2, 4}) {
      SCOPED_TRACE_OF(buffers);
      auto net = seeded<Stack>(17);
      shard_stack(net, {.mesh = hsdp_mesh(2, 2)});
      FSDPModule::of(net).set_reduce_scatter_max_input_buffers(buffers);
      stack_loss(net, 0).backward();
      auto& own = grads.emplace_back();
      for (const auto& param : net->parameters()) {
        own.push_back(param.grad());
      }
      for (size_t i = 0; i < own.size(); ++i) {
        EXPECT_SAME(own[i], grads[0][i]);
      }
    }
  });
}

TEST(Hsdp, ATransformerWithTiedWeights) {
  run_ranks(4, [](int) {
    const ModelArgs args{.n_layers = 3, .dropout_p = 0};
    auto [net, reference] = twins<Transformer>(args);
    shard_transformer(net, {.mesh = hsdp_mesh(2, 2)});
    train_and_compare(net, reference, transformer_loss, 5);
  });
}

TEST(Hsdp, ParametersSayHowTheyAreSpread) {
  run_ranks(4, [](int) {
    auto net = seeded<Stack>(5);
    const auto whole = seeded<Stack>(5);
    const auto mesh = hsdp_mesh(2, 2);
    fully_shard(net, {.mesh = mesh});
    const auto expected = whole->named_parameters();
    for (const auto& item : named_dtensors(net)) {
      EXPECT_EQ(item.value().device_mesh(), mesh);
      EXPECT_EQ(item.value().placements(), (std::vector<Placement>{Replicate{}, Shard{0}}));
      EXPECT_SAME(item.value().full_tensor(), expected[item.key()].detach());
    }
  });
}

TEST(Hsdp, ReplicasAgreeBitForBitAfterTwentySteps) {
  run_ranks(4, [](int) {
    for (const auto reduce_dtype : {torch::kFloat, torch::kBFloat16}) {
      SCOPED_TRACE_OF(reduce_dtype);
      auto net = seeded<Stack>(17);
      const auto mesh = hsdp_mesh(2, 2);
      shard_stack(
          net, {.mesh = mesh,
                .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = reduce_dtype}});
      torch::optim::AdamW optimizer(net->parameters(), 1e-2);
      for (int step = 0; step < 20; ++step) {
        stack_loss(net, step).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      for (const auto& param : net->parameters()) {
        expect_same_everywhere(as_dtensor(param).to_local(), mesh.get_group(0));
      }
    }
  });
}

// ------------------------------------------------------------ Accumulation

struct Accumulation {
  bool scatter_only; // every microbatch is reduce-scattered, the last all-reduced
  std::string mode;
  int reduce_scatters;
  int all_reduces;
};

TEST(Hsdp, GradientAccumulation) {
  const std::vector<Accumulation> cases{
      {false, "all", 4, 4}, {false, "some_mlps", 8, 8}, {false, "root_only", 10, 10},
      {true, "all", 12, 4}, {true, "some_mlps", 12, 8}, {true, "root_only", 12, 10},
  };
  run_ranks(4, [&](int) {
    for (const auto& each : cases) {
      for (const bool reshard : {true, false}) {
        SCOPED_TRACE_OF(each.mode, each.scatter_only, reshard);
        // Three of its own in a root that has one more.
        auto [net, reference] = twins<Stack>(8, 4);
        const FullyShardOptions options{.mesh = hsdp_mesh(2, 2), .reshard_after_forward = reshard};
        for (size_t i = 1; i < 4; ++i) {
          fully_shard(net->mlps[i], options);
        }
        auto root = fully_shard(net, options);
        torch::optim::Adam sharded_optimizer(net->parameters(), 1e-2);
        torch::optim::Adam optimizer(reference->parameters(), 1e-2);
        for (int step = 0; step < 3; ++step) {
          CommDebugMode comm;
          for (int microbatch = 0; microbatch < 3; ++microbatch) {
            const bool last = microbatch == 2;
            std::vector<FSDPModule> flagged{root};
            if (each.mode == "some_mlps") {
              flagged = {FSDPModule::of(net->mlps[1]), FSDPModule::of(net->mlps[2])};
            }
            for (auto& module : flagged) {
              const bool recurse = each.mode != "root_only";
              each.scatter_only ? module.set_requires_all_reduce(last, recurse)
                                : module.set_requires_gradient_sync(last, recurse);
            }
            compare_backward(net, reference, stack_loss, 10 * step + microbatch);
          }
          EXPECT_EQ(comm.count("reduce_scatter"), each.reduce_scatters);
          EXPECT_EQ(comm.count("all_reduce"), each.all_reduces);
          compare_and_step(net, reference, sharded_optimizer, optimizer, step % 2 == 1);
        }
      }
    }
  });
}

TEST(Hsdp, PartialSumsOfParametersThatTheLastMicrobatchDoesNotUse) {
  run_ranks(4, [](int) {
    auto [net, reference] = twins<Stack>(6);
    auto root = fully_shard(net, {.mesh = hsdp_mesh(2, 2)});
    root.set_requires_all_reduce(false);
    for (auto* each : {&net, &reference}) {
      stack_loss(*each, 0).backward();
    }
    for (const auto& param : net->parameters()) {
      EXPECT_FALSE(param.grad().defined());
    }
    root.set_requires_all_reduce(true);
    for (auto* each : {&net, &reference}) {
      (*each)->mlps.back()->out_proj->weight.set_requires_grad(each == &reference);
      stack_loss(*each, 1).backward();
    }
    net->mlps.back()->out_proj->weight.set_requires_grad(true);
    // The reference's second gradient of that weight is not in ours.
    auto only_first = seeded<Stack>(6);
    stack_loss(only_first, 0).backward();
    auto& weight = reference->mlps.back()->out_proj->weight;
    weight.mutable_grad() = only_first->mlps.back()->out_proj->weight.grad().clone();
    average_gradients(*reference);
    expect_parity(*net, *reference);
  });
}

// ------------------------------------------------------------ Reductions

TEST(Hsdp, DividesAsAsked) {
  run_ranks(4, [](int) {
    for (const bool force_sum : {false, true}) {
      for (const auto dtype : {torch::kFloat, torch::kHalf}) {
        for (const std::optional<double> factor : {std::optional<double>(), std::optional(2.0)}) {
          SCOPED_TRACE_OF(force_sum, dtype, factor);
          auto [net, reference] = twins<Stack>(8);
          auto root =
              fully_shard(net, {.mesh = hsdp_mesh(2, 2), .mp_policy = {.reduce_dtype = dtype}});
          root.set_force_sum_reduction_for_comms(force_sum);
          if (factor) {
            root.set_gradient_divide_factor(*factor);
          }
          stack_loss(net, 0).backward();
          stack_loss(reference, 0).backward();
          average_gradients(*reference);
          for (const auto& param : reference->parameters()) {
            param.mutable_grad().mul_(4 / factor.value_or(4));
          }
          expect_parity(*net, *reference, dtype == torch::kHalf ? 5e-3 : 1e-5);
        }
      }
    }
  });
}

TEST(Hsdp, ClipsByTheNormOfTheWhole) {
  run_ranks(4, [](int) {
    auto [net, reference] = twins<Stack>(5);
    shard_stack(net, {.mesh = hsdp_mesh(2, 2)});
    stack_loss(net, 0).backward();
    stack_loss(reference, 0).backward();
    average_gradients(*reference);
    const auto norm = clip_grad_norm_(net->parameters(), 0.1);
    const auto expected = clip_grad_norm_(reference->parameters(), 0.1);
    EXPECT_TRUE(near(norm, expected, 1e-5));
    expect_parity(*net, *reference);
  });
}

TEST(Hsdp, AHookReducesFurther) {
  run_ranks(4, [](int rank) {
    // Sharded among neighbours; the hook does what HSDP would.
    const auto world = hsdp_mesh(2, 2);
    const auto group = rank / 2;
    auto net = MLP(10, /*bias=*/false);
    {
      torch::NoGradGuard no_grad;
      net->in_proj->weight.fill_(1 * group);
      net->out_proj->weight.fill_(2 * group);
    }
    auto root = fully_shard(net, {.mesh = world["dp_shard"]});
    int calls = 0;
    root.set_all_reduce_hook(
        [&](torch::Tensor& flat) {
          ++calls;
          world.get_group("dp_replicate").all_reduce(flat, ReduceOp::Avg);
        },
        test_stream());
    net(torch::arange(10, torch::kFloat).view({1, 10})).sum().backward();
    EXPECT_EQ(calls, 1);
    EXPECT_CLOSE(net->out_proj->weight.grad(), torch::full({5, 40}, 22.5));
    EXPECT_CLOSE(
        net->in_proj->weight.grad(),
        torch::arange(0, 100, 10, torch::kFloat).view({1, 10}).expand({20, 10}));
  });
}

TEST(Hsdp, Refused) {
  run_ranks(4, [](int) {
    auto net = seeded<Stack>(4);
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>(
            [&] { fully_shard(net, {.mesh = init_device_mesh(test_device(), {2, 2})}); }),
        "mesh_dim_names"));
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] {
          fully_shard(net, {.mesh = init_device_mesh(test_device(), {2, 2, 1}, {"a", "b", "c"})});
        }),
        "expects a 1D or 2D DeviceMesh"));
    auto root = fully_shard(net, {.mesh = hsdp_mesh(2, 2)});
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>(
            [&] { root.set_all_reduce_hook([](torch::Tensor&) {}, test_stream()); }),
        "stream cannot be set when using native HSDP"));
    EXPECT_TRUE(
        contains(message_of<c10::ValueError>([&] { replicate(net); }), "already managed by"));
  });
}

TEST(Hsdp, OffloadedAndInLowPrecision) {
  run_ranks(4, [](int) {
    auto [net, plain] = twins<Stack>(16);
    const MixedPrecisionPolicy policy{
        .param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    shard_stack(
        net, {.mesh = hsdp_mesh(2, 2), .mp_policy = policy, .offload_policy = CPUOffloadPolicy{}});
    shard_stack(plain, {.mp_policy = policy});
    for (int step = 0; step < 3; ++step) {
      for (auto* each : {&net, &plain}) {
        stack_loss(*each, step).backward();
      }
      for (const auto& item : net->named_parameters()) {
        const auto expected = as_dtensor_grad(plain->named_parameters()[item.key()]).full_tensor();
        EXPECT_TRUE(near(as_dtensor_grad(item.value()).full_tensor(), expected, 1e-5))
            << item.key();
      }
    }
  });
}

TEST(Hsdp, ExtensionsAreGivenTheShardsMesh) {
  struct Plain : PlainExtension {
    AllGatherPayload pre_all_gather(
        const torch::Tensor& shard, const AllGatherInfo& info) override {
      EXPECT_EQ(info.mesh.ndim(), 1);
      EXPECT_EQ(info.mesh.size(), 4);
      ++calls;
      return PlainExtension::pre_all_gather(shard, info);
    }
    int calls = 0;
  };
  run_ranks(8, [](int) {
    auto [net, reference] = twins<Stack>(6);
    fully_shard(net, {.mesh = hsdp_mesh(2, 4)});
    const auto extension = std::make_shared<Plain>();
    set_all_gather_extension(net->mlps[0]->in_proj->weight, extension);
    train_and_compare(net, reference, stack_loss, 2);
    EXPECT_GT(extension->calls, 0);
  });
}

// Each holds half of a block: with replicas of two shards.
TEST(Hsdp, AtMostTwoAllReduceBuffersAreAlive) {
  run_ranks(4, [](int) {
    constexpr int64_t kDim = 16;
    constexpr int64_t kBlock = 4 * (8 * kDim * kDim + 5 * kDim); // bytes
    constexpr int64_t kPlaced = 4 * (8 * kDim * kDim) + 2 * 256; // gathered, the biases aligned
    auto net = seeded<Stack>(kDim, 8);
    shard_stack(net, {.mesh = hsdp_mesh(2, 2)});
    int64_t most = 0;
    for (const auto& param : net->parameters()) {
      register_post_accumulate_grad_hook(param, [&](const torch::Tensor&) {
        most = std::max(most, memory_stats(test_device()).communication);
      });
    }
    stack_loss(net, 0).backward();
    // A gather ahead, one reduce-scatter with its input, and two all-reduces.
    EXPECT_LE(most, kPlaced + kBlock + kBlock / 2 + 2 * kBlock / 2);
    EXPECT_GE(most, kBlock);
  });
}

// Sharding does not make replicas agree: they do if they were made alike.
TEST(Hsdp, ReplicasDifferUntilTheUserBroadcasts) {
  run_ranks(4, [](int rank) {
    auto net = seeded<Stack>(4);
    {
      torch::NoGradGuard no_grad;
      for (const auto& param : net->parameters()) {
        param.add_(rank / 2);
      }
    }
    const auto mesh = hsdp_mesh(2, 2);
    shard_stack(net, {.mesh = mesh});
    const auto replicas = mesh.get_group(0);
    for (const auto& param : net->parameters()) {
      auto sum = as_dtensor(param).to_local().clone();
      replicas.all_reduce(sum, ReduceOp::Max);
      EXPECT_EQ(sum.equal(as_dtensor(param).to_local()), rank / 2 == 1);
      torch::NoGradGuard no_grad;
      replicas.broadcast(as_dtensor(param).to_local(), 0);
    }
    stack_loss(net, 0).backward();
    for (const auto& param : net->parameters()) {
      expect_same_everywhere(param, replicas);
      expect_same_everywhere(param.grad(), replicas);
    }
  });
}

// ------------------------------------------------------------ replicate

TEST(ReplicateModules, TrainLikeTheUnshardedModel) {
  for (const int n : {1, 2, 3}) {
    run_ranks(n, [n](int) {
      auto [net, reference] = twins<Stack>(5);
      for (auto& mlp : net->mlps) {
        replicate(mlp);
      }
      replicate(net);
      CommDebugMode comm;
      train_and_compare(net, reference, stack_loss, 1);
      EXPECT_EQ(comm.count("all_gather"), 0);
      EXPECT_EQ(comm.count("reduce_scatter"), 0);
      train_and_compare(net, reference, stack_loss);
      for (const auto& item : named_dtensors(net)) {
        EXPECT_EQ(item.value().placements(), std::vector<Placement>{Replicate{}});
        EXPECT_EQ(item.value().device_mesh().size(), n);
      }
    });
  }
}

TEST(ReplicateModules, BesideShardedOnes) {
  run_ranks(4, [](int) {
    for (const bool root_is_replicated : {false, true}) {
      SCOPED_TRACE_OF(root_is_replicated);
      const ModelArgs args{.n_layers = 4, .dropout_p = 0};
      auto [net, reference] = twins<Transformer>(args);
      for (size_t i = 0; i < net->blocks.size(); ++i) {
        i % 2 == 0 ? replicate(net->blocks[i]) : fully_shard(net->blocks[i]);
      }
      root_is_replicated ? replicate(net) : fully_shard(net);
      train_and_compare(net, reference, transformer_loss, 5);
    }
  });
}

TEST(ReplicateModules, InLowPrecision) {
  run_ranks(2, [](int) {
    auto [net, reference] = twins<Stack>(8);
    replicate(net, {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
    auto loss = stack_loss(net, 0);
    EXPECT_EQ(loss.scalar_type(), torch::kBFloat16);
    loss.backward();
    stack_loss(reference, 0).backward();
    average_gradients(*reference);
    for (const auto& item : net->named_parameters()) {
      const auto expected = reference->named_parameters()[item.key()].grad();
      EXPECT_EQ(item.value().grad().scalar_type(), torch::kFloat);
      EXPECT_TRUE(torch::allclose(item.value().grad(), expected, 5e-2, 5e-2)) << item.key();
    }
  });
}

} // namespace
} // namespace fsdp::test
