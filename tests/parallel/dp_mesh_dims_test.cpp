// dp_mesh_dims: parameters that lie on a whole mesh, of which some axes are those
// of data parallelism.
#include "parallel/tp_models.h"

namespace fsdp {
namespace {

using namespace test;
using Names = std::vector<std::string>;
using Placements = std::vector<Placement>;

struct Case {
  std::vector<int64_t> shape;
  Names names;
  DataParallelMeshDims dims;
  bool reshard = true;
  bool by_replicate = false;
};

int64_t dp_rank(const DeviceMesh& mesh) {
  const auto& names = mesh.names();
  const bool has_tp = std::find(names.begin(), names.end(), "tp") != names.end();
  return has_tp ? get_rank() / mesh.size("tp") : get_rank();
}

/// Over "tp" if the mesh has it, the rest the same on all ranks.
void distribute(MLPStack& net, const DeviceMesh& mesh) {
  if (mesh.names().back() == "tp") {
    parallelize(net, mesh["tp"]);
  }
  distribute_module(net, mesh);
}

void shard(MLPStack& net, const DeviceMesh& mesh, const Case& each) {
  const auto apply = [&](ModuleRef module) {
    if (each.by_replicate) {
      replicate(module, {.mesh = mesh, .dp_mesh_dims = each.dims});
    } else {
      fully_shard(
          module, {.mesh = mesh, .reshard_after_forward = each.reshard, .dp_mesh_dims = each.dims});
    }
  };
  for (auto& mlp : net->mlps) {
    apply(mlp);
  }
  apply(net);
}

TEST(DpMeshDims, TrainsLikeTheUnshardedModel) {
  const std::vector<Case> cases{
      {{4}, {"fsdp"}, {.shard = {"fsdp"}}},
      {{4}, {"fsdp"}, {.shard = {"fsdp"}}, false},
      {{4}, {"ddp"}, {.replicate = {"ddp"}}},
      {{4}, {"ddp"}, {.replicate = {"ddp"}}, true, true},
      {{2, 2}, {"ddp", "fsdp"}, {.shard = {"fsdp"}, .replicate = {"ddp"}}},
      {{2, 2}, {"fsdp", "cp"}, {.shard = {"fsdp", "cp"}}},
      {{2, 2}, {"fsdp", "tp"}, {.shard = {"fsdp"}}},
      {{2, 2}, {"fsdp", "tp"}, {.shard = {"fsdp"}}, false},
      {{2, 2, 2}, {"ddp", "fsdp", "tp"}, {.shard = {"fsdp"}, .replicate = {"ddp"}}},
      {{2, 2, 2}, {"fsdp", "cp", "tp"}, {.shard = {"fsdp", "cp"}}},
      {{2, 2}, {"ddp", "pod"}, {.replicate = {"ddp", "pod"}}},
      {{2, 2, 2}, {"ddp", "pod", "fsdp"}, {.shard = {"fsdp"}, .replicate = {"ddp", "pod"}}}};
  for (const auto& each : cases) {
    int ranks = 1;
    for (const auto size : each.shape) {
      ranks *= static_cast<int>(size);
    }
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(test_device(), each.shape, each.names);
      SCOPED_TRACE(mesh.str());
      for (const int64_t dim : {5, 16}) {
        SCOPED_TRACE_OF(dim);
        auto net = in_double<MLPStack>(dim);
        auto reference = in_double<MLPStack>(dim);
        distribute(net, mesh);
        shard(net, mesh, each);
        expect_parity(*net, *reference, 0);
        train_and_compare(net, reference, [&](MLPStack& any, int step) {
          return any(tp_batch(step, {8, dim}, dp_rank(mesh))).sum();
        });
        const auto wholes = reference->named_parameters();
        for (const auto& item : net->named_parameters()) {
          EXPECT_TRUE(
              near(as_dtensor(item.value()).full_tensor(), wholes[item.key()].detach(), 1e-5));
        }
      }
    });
  }
}

TEST(DpMeshDims, OneAxisIsTheMeshThatWasGiven) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {4}, {"fsdp"});
    auto net = in_double<MLPStack>(8);
    distribute_module(net, mesh);
    fully_shard(net, {.mesh = mesh, .dp_mesh_dims = {{.shard = {"fsdp"}}}});
    for (const auto& param : net->parameters()) {
      EXPECT_EQ(as_dtensor(param).device_mesh(), mesh);
      EXPECT_EQ(as_dtensor(param).placements(), (Placements{Shard{0}}));
    }
  });
}

TEST(DpMeshDims, PlacementsWithTensorParallelism) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"fsdp", "tp"});
    auto net = in_double<MLPStack>(8);
    distribute(net, mesh);
    FullyShardOptions options{.mesh = mesh, .dp_mesh_dims = {{.shard = {"fsdp"}}}};
    options.shard_placement_fn = [](const std::string& name, const torch::Tensor&) {
      return std::optional<ShardPlacement>(Shard{name.ends_with("in_proj.weight") ? 1 : 0});
    };
    fully_shard(net, options);
    const auto& mlp = net->mlps[0];
    const auto expect = [&](const torch::Tensor& param, const Placements& placements) {
      EXPECT_EQ(as_dtensor(param).device_mesh(), mesh);
      EXPECT_EQ(as_dtensor(param).placements(), placements);
    };
    expect(mlp->in_proj->weight, {Shard{1}, Shard{0}});
    expect(mlp->in_proj->bias, {StridedShard{0, 2}, Shard{0}});
    expect(mlp->out_proj->weight, {Shard{0}, Shard{1}});
    expect(mlp->out_proj->bias, {Shard{0}, Replicate{}});
  });
}

/// Shards over an axis that comes behind that of tensor parallelism.
TEST(DpMeshDims, DataParallelAxesMayComeLast) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"tp", "fsdp"});
    auto net = in_double<MLPStack>(5);
    auto reference = in_double<MLPStack>(5);
    parallelize(net, mesh["tp"]);
    distribute_module(net, mesh);
    fully_shard(net, {.mesh = mesh, .dp_mesh_dims = {{.shard = {"fsdp"}}}});
    EXPECT_EQ(
        as_dtensor(net->mlps[0]->in_proj->weight).placements(), (Placements{Shard{0}, Shard{0}}));
    expect_parity(*net, *reference, 0);
    train_and_compare(net, reference, [&](MLPStack& any, int step) {
      return any(tp_batch(step, {8, 5}, mesh.get_local_rank("fsdp"))).sum();
    });
  });
}

/// Two experts, of which one is used.
struct TwoExpertsImpl : torch::nn::Module {
  TwoExpertsImpl()
      : used(register_parameter("used", torch::ones({4, 4}, torch::kDouble))),
        unused(register_parameter("unused", torch::ones({4, 4}, torch::kDouble))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return x.matmul(used.t());
  }
  torch::Tensor used, unused;
};
FSDP_MODULE(TwoExperts);

TEST(DpMeshDims, UnusedParametersMayBeReducedAsZeros) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"dp", "ep"});
    TwoExperts net;
    for (const auto* name : {"used", "unused"}) {
      distribute_parameter(net, name, mesh, {Replicate{}, Shard{0}});
    }
    fully_shard(net, {.mesh = mesh, .dp_mesh_dims = {{.shard = {"dp"}}}})
        .set_reduce_scatter_unused_params(true);
    net(tp_batch(0, {3, 4})).sum().backward();
    ASSERT_TRUE(net->unused.grad().defined());
    EXPECT_EQ(net->unused.grad().count_nonzero().item<int64_t>(), 0);
    EXPECT_EQ(
        as_dtensor_grad(net->unused).placements(), (Placements{StridedShard{0, 2}, Shard{0}}));
  });
}

TEST(DpMeshDims, Refused) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2}, {"fsdp", "tp"});
    const auto refuse = [&](const MLPStack& net, const DeviceMesh& over,
                            const DataParallelMeshDims& dims,
                            const std::vector<std::string>& parts) {
      CommDebugMode comm;
      const auto message = message_of<c10::ValueError>(
          [&] { fully_shard(net, {.mesh = over, .dp_mesh_dims = dims}); });
      for (const auto& part : parts) {
        EXPECT_TRUE(contains(message, part));
      }
      EXPECT_EQ(comm.total(), 0);
      EXPECT_FALSE(is_fsdp_module(net));
    };
    auto plain = in_double<MLPStack>(4);
    refuse(plain, mesh, {.shard = {"fsdp"}}, {"'0.in_proj.weight'", "must be DTensors"});
    auto net = in_double<MLPStack>(4);
    distribute(net, mesh);
    refuse(net, mesh, {}, {"At least one of shard or replicate"});
    refuse(net, mesh, {.shard = {"dp"}}, {"'dp'", "not found in mesh.mesh_dim_names", "fsdp=2"});
    refuse(net, mesh, {.shard = {"fsdp"}, .replicate = {"fsdp"}}, {"'fsdp' twice"});
    refuse(net, mesh, {.shard = {"tp"}}, {"'0.in_proj.weight'", "Expected Replicate", "'tp'"});
    const auto unnamed = init_device_mesh(test_device(), {2, 2});
    refuse(net, unnamed, {.shard = {"fsdp"}}, {"must have mesh_dim_names"});
    const auto other = init_device_mesh(test_device(), {4, 1}, {"fsdp", "tp"});
    refuse(net, other, {.shard = {"fsdp"}}, {"'0.in_proj.weight'", "not the same mesh"});
    EXPECT_TRUE(contains(
        message_of<c10::NotImplementedError>([&] {
          fully_shard(
              net,
              {.mesh = mesh, .reshard_after_forward = 2, .dp_mesh_dims = {{.shard = {"fsdp"}}}});
        }),
        "reshard_after_forward as int"));
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>(
            [&] { replicate(net, {.mesh = mesh, .dp_mesh_dims = {{.shard = {"fsdp"}}}}); }),
        "fsdp to shard over"));
    const auto three = init_device_mesh(test_device(), {2, 2, 1}, {"a", "b", "c"});
    EXPECT_TRUE(contains(
        message_of<c10::ValueError>([&] { fully_shard(plain, {.mesh = three}); }),
        "expects a 1D or 2D DeviceMesh"));
  });
}

} // namespace
} // namespace fsdp
