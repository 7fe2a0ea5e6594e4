// Meshes of three and four axes: HSDP over tensor parallelism, experts on a mesh
// of their own, and norms, scales and checkpointing over all of it.
#include <fsdp/activation_checkpointing.h>
#include <fsdp/clip_grad_norm.h>
#include <fsdp/grad_scaler.h>
#include <fsdp/optim.h>

#include "parallel/experts_model.h"

namespace fsdp {
namespace {

using namespace test;
using Names = std::vector<std::string>;
using Placements = std::vector<Placement>;

enum class Checkpointed : std::uint8_t { No, BeforeTp, AfterFsdp };

void checkpoint_mlps(const MLPStack& net) {
  apply_activation_checkpointing(net, [](const std::string&, torch::nn::Module& module) {
    return module.as<MLP>() != nullptr;
  });
}

TEST(ThreeD, MLPStack) {
  run_ranks(8, [](int) {
    const auto mesh =
        init_device_mesh(test_device(), {2, 2, 2}, {"dp_replicate", "dp_shard", "tp"});
    const auto dp = mesh[{"dp_replicate", "dp_shard"}];
    for (const int64_t dim : {3, 5, 16, 17}) {
      for (const auto checkpointed :
           {Checkpointed::No, Checkpointed::BeforeTp, Checkpointed::AfterFsdp}) {
        const bool reshard = dim % 2 == 1;
        SCOPED_TRACE(c10::str("dim ", dim, ", checkpointed ", int(checkpointed)));
        auto net = in_double<MLPStack>(dim);
        auto reference = in_double<MLPStack>(dim);
        if (checkpointed == Checkpointed::BeforeTp) {
          checkpoint_mlps(net);
        }
        parallelize(net, mesh["tp"]);
        for (auto& mlp : net->mlps) {
          fully_shard(mlp, {.mesh = dp, .reshard_after_forward = reshard});
        }
        fully_shard(net, {.mesh = dp, .reshard_after_forward = reshard});
        if (checkpointed == Checkpointed::AfterFsdp) {
          checkpoint_mlps(net);
        }
        const auto wholes = reference->named_parameters();
        for (const auto& item : net->named_parameters()) {
          const auto spread = as_dtensor(item.value());
          EXPECT_EQ(spread.device_mesh().names(), (Names{"dp_replicate", "dp_shard", "tp"}));
          EXPECT_SAME(spread.full_tensor(), wholes[item.key()].detach());
        }
        train_and_compare(
            net, reference,
            [&](MLPStack& each, int step) {
              return each(tp_batch(step, {8, dim}, get_rank() / 2)).sum();
            },
            checkpointed == Checkpointed::No ? 10 : 3);
      }
    }
  });
}

TEST(ThreeD, TransformerBySequenceCheckpointed) {
  run_ranks(8, [](int) {
    const auto mesh =
        init_device_mesh(test_device(), {2, 2, 2}, {"dp_replicate", "dp_shard", "tp"});
    const ModelArgs args{.dropout_p = 0};
    auto net = in_double<Transformer>(args);
    auto reference = in_double<Transformer>(args);
    parallelize(net, mesh["tp"], /*sequence=*/true);
    apply_activation_checkpointing(net, [](const std::string&, torch::nn::Module& module) {
      // The norms and projections have styles of their own.
      return module.as<TransformerBlock>() || module.as<LayerNorm>() || module.as<Linear>();
    });
    shard_transformer(net, {.mesh = mesh[{"dp_replicate", "dp_shard"}]});
    train_and_compare(net, reference, [&](Transformer& each, int step) {
      return each(tp_tokens(step, {2, 16}, 8, get_rank() / 2)).sum();
    });
  });
}

TEST(ThreeD, ReplicatedTensorParallel) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 1, 2}, {"replicate", "shard", "tp"});
    for (const int64_t dim : {3, 5, 16, 17}) {
      for (const bool checkpointed : {false, true}) {
        SCOPED_TRACE_OF(dim, checkpointed);
        auto net = in_double<MLPStack>(dim);
        auto reference = in_double<MLPStack>(dim);
        parallelize(net, mesh["tp"]);
        if (checkpointed) {
          checkpoint_mlps(net);
        }
        for (auto& mlp : net->mlps) {
          replicate(mlp, {.mesh = mesh["replicate"]});
        }
        replicate(net, {.mesh = mesh["replicate"]});
        const auto weight = as_dtensor(net->mlps[0]->in_proj->weight);
        EXPECT_EQ(weight.device_mesh().names(), (Names{"replicate", "tp"}));
        EXPECT_EQ(weight.placements(), (Placements{Replicate{}, Shard{0}}));
        train_and_compare(net, reference, [&](MLPStack& each, int step) {
          return each(tp_batch(step, {8, dim}, mesh.get_local_rank("replicate"))).sum();
        });
      }
    }
  });
}

// ------------------------------------------------------------ Experts

class ExpertParallel : public testing::TestWithParam<std::vector<int64_t>> {
 protected:
  static int num_ranks() {
    int ranks = 1;
    for (const auto size : GetParam()) {
      ranks *= static_cast<int>(size);
    }
    return ranks;
  }
};
INSTANTIATE_TEST_SUITE_P(
    Grids,
    ExpertParallel,
    testing::Values(
        std::vector<int64_t>{1, 2, 2, 1},
        std::vector<int64_t>{1, 4, 2, 1},
        std::vector<int64_t>{2, 2, 2, 1},
        std::vector<int64_t>{1, 2, 2, 2},
        std::vector<int64_t>{2, 1, 2, 2},
        std::vector<int64_t>{2, 2, 2, 2}),
    [](const auto& info) {
      std::string name;
      for (const auto size : info.param) {
        name += (name.empty() ? "" : "x") + std::to_string(size);
      }
      return name;
    });

torch::Tensor loss_of(ExpertsNet& net, const ExpertMeshes& meshes, int step, int64_t dim) {
  return net(tp_batch(step, {4, dim}, meshes.dp_rank())).pow(2).mean();
}

TEST_P(ExpertParallel, TrainsLikeTheUnshardedModel) {
  run_ranks(num_ranks(), [](int) {
    const ExpertMeshes meshes(GetParam());
    const int64_t dim = 6;
    for (const auto& [reshard, merged_dims] :
         {std::pair(ReshardAfterForward(true), 1), {true, 2}, {false, 1}, {false, 2}}) {
      SCOPED_TRACE_OF(reshard, merged_dims);
      auto net = in_double<ExpertsNet>(dim);
      auto reference = in_double<ExpertsNet>(dim);
      parallelize(net, meshes);
      shard(net, meshes, reshard, merged_dims);
      expect_parity(*net, *reference, 0);
      torch::optim::AdamW optimizer(net->parameters(), 1e-2);
      torch::optim::AdamW expected_optimizer(reference->parameters(), 1e-2);
      for (int step = 0; step < 5; ++step) {
        SCOPED_TRACE(c10::str("step ", step));
        auto loss = loss_of(net, meshes, step, dim);
        auto expected = loss_of(reference, meshes, step, dim);
        EXPECT_TRUE(near(loss.detach(), expected.detach(), 1e-5));
        loss.backward();
        expected.backward();
        average_gradients(reference, meshes.grid.size("ep"));
        expect_parity(*net, *reference);
        optimizer.step();
        expected_optimizer.step();
        optimizer.zero_grad();
        expected_optimizer.zero_grad();
        expect_parity(*net, *reference);
      }
    }
  });
}

TEST_P(ExpertParallel, PlacementsSayWhoHasWhat) {
  run_ranks(num_ranks(), [](int) {
    const ExpertMeshes meshes(GetParam());
    for (const bool by_rows : {false, true}) {
      auto net = in_double<ExpertsNet>(4);
      parallelize(net, meshes);
      shard(net, meshes, true, by_rows ? 2 : 1);
      Names names{"efsdp", "ep"};
      const Placement over_efsdp = by_rows ? Placement(BlockShard{2}) : StridedShard{0, 2};
      Placements w1{over_efsdp, Shard{0}}, w2 = w1, norm{Shard{0}};
      if (meshes.grid.size("tp") > 1) {
        names.emplace_back("tp");
        w1.emplace_back(Shard{2});
        w2.emplace_back(Shard{1});
      }
      if (meshes.replicates()) {
        names.insert(names.begin(), "replicate");
        for (auto* placements : {&w1, &w2, &norm}) {
          placements->insert(placements->begin(), Replicate{});
        }
      }
      auto& block = net->blocks[1];
      EXPECT_EQ(as_dtensor(block->experts->w1).device_mesh().names(), names);
      EXPECT_EQ(as_dtensor(block->experts->w1).placements(), w1);
      EXPECT_EQ(as_dtensor(block->experts->w2).placements(), w2);
      EXPECT_EQ(as_dtensor(block->norm->weight).placements(), norm);
      EXPECT_EQ(as_dtensor(block->norm->weight).device_mesh(), meshes.dense());
    }
  });
}

TEST_P(ExpertParallel, NormsOverAllMeshesAreThoseOfTheWhole) {
  run_ranks(num_ranks(), [](int) {
    const ExpertMeshes meshes(GetParam());
    for (const double order : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
      SCOPED_TRACE_OF(order);
      auto net = in_double<ExpertsNet>(5);
      auto reference = in_double<ExpertsNet>(5);
      parallelize(net, meshes);
      shard(net, meshes, true, order == 2 ? 2 : 1);
      loss_of(net, meshes, 0, 5).backward();
      loss_of(reference, meshes, 0, 5).backward();
      average_gradients(reference, meshes.grid.size("ep"));
      const auto norm = clip_grad_norm_(net->parameters(), 0.01, order);
      const auto expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.01, order);
      EXPECT_NEAR(norm.item<double>(), expected, 1e-6 * expected);
      expect_parity(*net, *reference);
    }
  });
}

TEST_P(ExpertParallel, OneRanksInfinityIsFoundByAll) {
  run_ranks(num_ranks(), [](int rank) {
    const ExpertMeshes meshes(GetParam());
    auto net = seeded<ExpertsNet>(8);
    parallelize(net, meshes);
    shard(net, meshes);
    optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
    GradScaler scaler({.init_scale = 4});
    for (const bool infinite : {true, false}) {
      SCOPED_TRACE_OF(infinite);
      scaler.scale(net(tp_batch(0, {4, 8}, meshes.dp_rank()).to(torch::kFloat)).sum()).backward();
      const auto& weight = net->blocks[0]->experts->w1;
      if (infinite && rank == get_world_size() - 1 && weight.grad().numel() > 0) {
        weight.grad().view(-1)[0] = std::numeric_limits<float>::infinity();
      }
      const auto before = as_dtensor(net->output->weight).to_local().clone();
      scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 2.0);
      EXPECT_EQ(torch::equal(before, as_dtensor(net->output->weight).to_local()), infinite);
      optimizer.zero_grad();
    }
  });
}

// ------------------------------------------------------------ Scales

TEST(TwoD, OneRanksInfinityIsFoundByAll) {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    for (const bool infinite : {true, false}) {
      SCOPED_TRACE_OF(infinite);
      auto net = seeded<MLPStack>(2);
      parallelize(net, mesh["tp"]);
      for (auto& mlp : net->mlps) {
        fully_shard(mlp, {.mesh = mesh["dp"]});
      }
      fully_shard(net, {.mesh = mesh["dp"]});
      optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
      GradScaler scaler({.init_scale = 2, .growth_interval = 100});
      scaler.scale(net(tp_batch(0, {3, 2}).to(torch::kFloat)).sum()).backward();
      auto grad = net->mlps[0]->in_proj->weight.grad();
      if (infinite && rank == 1) {
        grad[0][0] = std::numeric_limits<float>::infinity();
      }
      const auto scaled = grad.clone();
      scaler.unscale_(optimizer);
      EXPECT_SAME(grad, scaled / 2);
      scaler.step(optimizer);
      EXPECT_EQ(optimizer.state().empty(), infinite);
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), infinite ? 1.0 : 2.0);
    }
  });
}

} // namespace
} // namespace fsdp
