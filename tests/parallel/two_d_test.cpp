// fully_shard over what tensor parallelism has divided: meshes of two axes and more.
#include <fsdp/call.h>
#include <fsdp/clip_grad_norm.h>
#include <fsdp/meta_init.h>

#include "parallel/tp_models.h"

namespace fsdp {
namespace {

using namespace test;
using Placements = std::vector<Placement>;

void shard(MLPStack& net, const DeviceMesh& dp, bool reshard) {
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, {.mesh = dp, .reshard_after_forward = reshard});
  }
  fully_shard(net, {.mesh = dp, .reshard_after_forward = reshard});
}

TEST(TwoD, PlacementsOfThePieces) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    auto net = in_double<MLP>(9, true, false, 3);
    auto reference = in_double<MLP>(9, true, false, 3);
    parallelize_module(net, mesh["tp"], mlp_plan());
    fully_shard(net, {.mesh = mesh["dp"]});
    const auto expect = [&](const torch::Tensor& param, const torch::Tensor& whole,
                            const Placements& placements) {
      const auto spread = as_dtensor(param);
      EXPECT_EQ(spread.device_mesh(), mesh);
      EXPECT_EQ(spread.placements(), placements);
      EXPECT_EQ(spread.sizes(), whole.sizes());
      EXPECT_SAME(spread.full_tensor(), whole.detach());
    };
    expect(net->in_proj->weight, reference->in_proj->weight, {StridedShard{0, 2}, Shard{0}});
    expect(net->in_proj->bias, reference->in_proj->bias, {StridedShard{0, 2}, Shard{0}});
    expect(net->out_proj->weight, reference->out_proj->weight, {Shard{0}, Shard{1}});
    expect(net->out_proj->bias, reference->out_proj->bias, {Shard{0}, Replicate{}});
  });
}

TEST(TwoD, MLPStack) {
  run_ranks(8, [](int) {
    const auto grid = init_device_mesh(test_device(), {2, 2, 2}, {"pp", "dp", "tp"});
    const auto dp_rank = get_rank() / 2; // each pipeline stage its own data
    for (const int64_t dim : {3, 5, 16, 17}) {
      for (const bool reshard : {true, false}) {
        SCOPED_TRACE(c10::str("dim ", dim, reshard ? ", resharded" : ""));
        auto net = in_double<MLPStack>(dim);
        auto reference = in_double<MLPStack>(dim);
        parallelize(net, grid["tp"]);
        shard(net, grid["dp"], reshard);
        CommDebugMode comm;
        for (const auto& item : net->named_parameters()) {
          const auto spread = as_dtensor(item.value());
          EXPECT_EQ(spread.device_mesh().names(), (std::vector<std::string>{"dp", "tp"}));
        }
        EXPECT_EQ(comm.total(), 0);
        // Both stages get the same: the world's average is that over dp.
        train_and_compare(
            net, reference,
            [&](MLPStack& each, int step) {
              return each(tp_batch(step, {8, dim}, dp_rank % 2)).sum();
            },
            10);
      }
    }
  });
}

TEST(TwoD, TransformerBySequence) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    for (const bool other_dim : {false, true}) {
      SCOPED_TRACE_OF(other_dim);
      const ModelArgs args{.n_layers = 3, .dropout_p = 0};
      auto net = in_double<Transformer>(args);
      auto reference = in_double<Transformer>(args);
      parallelize(net, mesh["tp"], /*sequence=*/true);
      FullyShardOptions options{.mesh = mesh["dp"]};
      if (other_dim) { // than that of tensor parallelism
        options.shard_placement_fn = [](const std::string&, const torch::Tensor& param) {
          const auto spread = detail::TensorPiece::find(param);
          const auto* by_tp = spread ? std::get_if<Shard>(&spread->spec().placements[0]) : nullptr;
          return std::optional<ShardPlacement>(Shard{by_tp ? param.dim() - 1 - by_tp->dim : 0});
        };
      }
      shard_transformer(net, options);
      EXPECT_EQ(
          as_dtensor(net->pos_embeddings->weight).placements(),
          (other_dim ? Placements{Shard{1}, Shard{0}} : Placements{StridedShard{0, 2}, Shard{0}}));
      EXPECT_EQ(as_dtensor(net->norm->weight).placements(), (Placements{Shard{0}, Replicate{}}));
      train_and_compare(
          net, reference,
          [&](Transformer& each, int step) {
            return each(tp_tokens(step, {2, 16}, 8, mesh.get_local_rank("dp"))).sum();
          },
          5);
    }
  });
}

TEST(TwoD, SomePiecesAreEmpty) {
  run_ranks(8, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 4}, {"dp", "tp"});
    // Three hidden features over four ranks, and fewer rows than ranks of dp.
    auto net = in_double<MLP>(1, true, false, 3);
    auto reference = in_double<MLP>(1, true, false, 3);
    parallelize_module(net, mesh["tp"], mlp_plan());
    fully_shard(net, {.mesh = mesh["dp"]});
    train_and_compare(net, reference, [&](MLP& each, int step) {
      return each(tp_batch(step, {4, 1}, mesh.get_local_rank("dp"))).sum();
    });
  });
}

TEST(TwoD, OneWayShardedOnTheHost) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {1, 4}, {"dp", "tp"});
    auto net = in_double<MLPStack>(16);
    auto reference = in_double<MLPStack>(16);
    parallelize(net, mesh["tp"]);
    const FullyShardOptions options{
        .mesh = mesh["dp"], .reshard_after_forward = true, .offload_policy = CPUOffloadPolicy{}};
    for (auto& mlp : net->mlps) {
      fully_shard(mlp, options);
    }
    fully_shard(net, options);
    CommDebugMode comm;
    train_and_compare(
        net, reference,
        [&](MLPStack& each, int step) {
          comm.clear();
          auto loss = each(tp_batch(step, {8, 16})).sum();
          if (&*each == &*net) {
            EXPECT_EQ(comm.count("all_reduce"), 3);
            EXPECT_EQ(comm.total(), 3);
          }
          return loss;
        },
        10);
    auto loss = net(tp_batch(0, {8, 16})).sum();
    comm.clear();
    loss.backward();
    EXPECT_EQ(comm.count("all_reduce"), 2);
    EXPECT_EQ(comm.total(), 2);
  });
}

TEST(TwoD, ByFsdpCall) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    auto net = in_double<Linear>(6, 4);
    auto reference = in_double<Linear>(6, 4);
    parallelize_module(net, mesh["tp"], RowwiseParallel{.input_layouts = Replicate{}});
    fully_shard(net, {.mesh = mesh["dp"]});
    train_and_compare(net, reference, [&](Linear& each, int step) {
      return call(each, tp_batch(step, {3, 6}, mesh.get_local_rank("dp"))).pow(2).sum();
    });
  });
}

TEST(TwoD, NormsOfGradientsAreThoseOfTheWhole) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    auto net = in_double<MLPStack>(17);
    auto reference = in_double<MLPStack>(17);
    parallelize(net, mesh["tp"]);
    shard(net, mesh["dp"], true);
    net(tp_batch(0, {8, 17})).pow(2).sum().backward();
    reference(tp_batch(0, {8, 17})).pow(2).sum().backward();
    const auto norm = clip_grad_norm_(net->parameters(), 0.5);
    const auto expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.5);
    EXPECT_NEAR(norm.item<double>(), expected, 1e-4 * expected);
    expect_parity(*net, *reference);
  });
}

TEST(TwoD, BuiltOnMeta) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "tp"});
    for (const int64_t dim : {8, 3}) {
      SCOPED_TRACE_OF(dim);
      MLP net{nullptr};
      {
        MetaInit on_meta;
        net = MLP(dim);
        parallelize_module(net, mesh["tp"], mlp_plan());
        fully_shard(net, {.mesh = mesh["dp"]});
      }
      for (const auto& param : net->parameters()) {
        EXPECT_TRUE(param.is_meta());
      }
      to_empty(net, test_device());
      const auto fill = [](const std::string&, torch::Tensor& param) { param.normal_(); };
      init_parameters(net, fill);
      auto reference = seeded<MLP>(dim);
      init_parameters(reference, fill);
      expect_parity(*net, *reference, 0);
      net(tp_batch(0, {4, dim}).to(torch::kFloat)).sum().backward();
    }
  });
}

} // namespace
} // namespace fsdp
