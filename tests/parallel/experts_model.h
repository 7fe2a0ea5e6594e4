#pragma once

// A model with experts: dense parameters on one mesh, experts on another.

#include "parallel/tp_models.h"

namespace fsdp::test {

/// All experts for every token, weighted by its gates. With meshes, each rank has
/// some of the experts (ep) and some of their hidden features (tp), and computes
/// with the tokens of all ranks of ep.
struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl(int64_t num_experts, int64_t dim)
      : w1(register_parameter("w1", torch::randn({num_experts, dim, 2 * dim}) / 4)),
        w2(register_parameter("w2", torch::randn({num_experts, 2 * dim, dim}) / 4)) {}

  torch::Tensor forward(torch::Tensor x, torch::Tensor gates) {
    const RedistributeOptions summed{.grad_placement = Partial{}};
    if (ep) {
      x = redistribute(x, *ep, Shard{0}, Replicate{}, summed);
      gates = redistribute(gates, *ep, Shard{0}, Replicate{}, summed);
      gates = gates.narrow(1, ep->get_local_rank() * w1.size(0), w1.size(0));
    }
    if (tp) {
      x = redistribute(x, *tp, Replicate{}, Replicate{}, summed);
      gates = redistribute(gates, *tp, Replicate{}, Replicate{}, summed);
    }
    const auto hidden = torch::relu(torch::einsum("td,edh->teh", {x, w1}));
    auto y = torch::einsum("te,teh,ehd->td", {gates, hidden, w2});
    if (tp) {
      y = redistribute(y, *tp, Partial{}, Replicate{});
    }
    return ep ? redistribute(y, *ep, Partial{}, Shard{0}) : y;
  }

  torch::Tensor w1, w2;
  std::optional<DeviceMesh> ep, tp;
};
FSDP_MODULE(Experts);

struct ExpertsBlockImpl : torch::nn::Module {
  ExpertsBlockImpl(int64_t num_experts, int64_t dim)
      : norm(register_module("norm", layer_norm(dim))),
        router(register_module("router", Linear(dim, num_experts))),
        experts(register_module("experts", Experts(num_experts, dim))),
        mlp(register_module("mlp", MLP(dim))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    const auto h = norm(x);
    return x + experts(h, torch::softmax(router(h), -1)) + mlp(h);
  }

  LayerNorm norm;
  Linear router;
  Experts experts;
  MLP mlp;
};
FSDP_MODULE(ExpertsBlock);

struct ExpertsNetImpl : torch::nn::Module {
  explicit ExpertsNetImpl(int64_t dim, int64_t num_experts = 8, int64_t depth = 2) {
    for (int64_t i = 0; i < depth; ++i) {
      blocks.push_back(
          register_module("block" + std::to_string(i), ExpertsBlock(num_experts, dim)));
    }
    output = register_module("output", Linear(dim, dim));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : blocks) {
      x = block(x);
    }
    return output(x);
  }
  std::vector<ExpertsBlock> blocks;
  Linear output{nullptr};
};
FSDP_MODULE(ExpertsNet);

/// The grid (replicate, efsdp, ep, tp): dense parameters are sharded over efsdp
/// and ep as one axis, experts over efsdp alone.
struct ExpertMeshes {
  explicit ExpertMeshes(const std::vector<int64_t>& sizes)
      : grid(init_device_mesh(test_device(), sizes, {"replicate", "efsdp", "ep", "tp"})),
        shard(grid[{"efsdp", "ep"}].flatten("dp_shard")) {}

  bool replicates() const {
    return grid.size("replicate") > 1;
  }
  DeviceMesh dense() const {
    return replicates() ? grid[{"replicate", "dp_shard"}] : shard;
  }
  DeviceMesh experts() const {
    return replicates() ? grid[{"replicate", "efsdp"}] : grid["efsdp"];
  }
  int64_t dp_rank() const {
    return get_rank() / grid.size("tp");
  }

  DeviceMesh grid;
  DeviceMesh shard;
};

inline void parallelize(ExpertsNet& net, const ExpertMeshes& meshes) {
  const bool by_tp = meshes.grid.size("tp") > 1;
  for (auto& block : net->blocks) {
    auto& experts = block->experts;
    experts->ep = meshes.grid["ep"];
    if (by_tp) {
      experts->tp = meshes.grid["tp"];
      parallelize_module(
          block, meshes.grid["tp"],
          {{"mlp.in_proj", ColwiseParallel{}}, {"mlp.out_proj", RowwiseParallel{}}});
    }
    for (const auto& [name, dim] : {std::pair("w1", 2), std::pair("w2", 1)}) {
      if (by_tp) {
        distribute_parameter(experts, name, meshes.grid[{"ep", "tp"}], {Shard{0}, Shard{dim}});
      } else {
        distribute_parameter(experts, name, meshes.grid["ep"], {Shard{0}});
      }
    }
  }
}

/// With `merged_dims` of 2, the ranks of efsdp divide the rows of a rank's experts, not the
/// experts.
inline void shard(
    ExpertsNet& net,
    const ExpertMeshes& meshes,
    const ReshardAfterForward& reshard = true,
    int64_t merged_dims = 1) {
  FullyShardOptions options{.mesh = meshes.dense()};
  options.shard_placement_fn = [&](const std::string& name, const torch::Tensor&) {
    return std::optional(
        name.starts_with("experts.") ? ShardPlacement{0, meshes.experts(), merged_dims}
                                     : ShardPlacement{0});
  };
  for (auto& block : net->blocks) {
    fully_shard(block, options);
  }
  options.shard_placement_fn = nullptr;
  options.reshard_after_forward = reshard;
  fully_shard(net, options);
}

/// Every rank of ep computes for the tokens of all of them: a sum, of which only
/// the other axes average.
inline void average_gradients(ExpertsNet& reference, int64_t ep_size) {
  average_gradients(*reference);
  for (auto& block : reference->blocks) {
    block->experts->w1.mutable_grad() *= ep_size;
    block->experts->w2.mutable_grad() *= ep_size;
  }
}

} // namespace fsdp::test
