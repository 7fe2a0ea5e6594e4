// Shards a model as its case says, and makes the optimizer.
#include <torch/optim/adam.h>
#include <torch/torch.h>

#include <fsdp/activation_checkpointing.h>
#include <fsdp/optim.h>

#include "cli/fuzz/model.h"

namespace fsdp::cli::fuzz {

namespace {

class Sharding {
 public:
  explicit Sharding(const Case& c) : case_(c), handles_(c.groups.size()) {}

  std::vector<FSDPModule> run(Node& net) {
    shard_below(*net);
    handles_[0] = shard({net.ptr()}, case_.groups[0]);
    std::vector<FSDPModule> handles;
    for (auto& handle : handles_) {
      handles.push_back(*handle);
    }
    for (size_t i = 0; i < handles.size(); ++i) {
      const auto& group = case_.groups[i];
      if (!group.forward_prefetch.empty()) {
        handles[i].set_modules_to_forward_prefetch(list(handles, group.forward_prefetch));
      }
      if (!group.backward_prefetch.empty()) {
        handles[i].set_modules_to_backward_prefetch(list(handles, group.backward_prefetch));
      }
      if (group.reduce_unused) {
        handles[i].set_reduce_scatter_unused_params(true, /*recurse=*/false);
      }
    }
    return handles;
  }

 private:
  void shard_below(NodeImpl& node) {
    for (auto& inner : node.nodes) {
      shard_below(*inner);
    }
    for (auto& inner : node.nodes) {
      const int group = inner->block.group;
      if (group == node.block.group || handles_[group]) {
        continue;
      }
      std::vector<NodeImpl::Ptr> together;
      for (auto& each : node.nodes) {
        if (each->block.group == group) {
          together.push_back(each);
        }
      }
      handles_[group] = shard(together, case_.groups[group]);
    }
  }

  FSDPModule shard(const std::vector<NodeImpl::Ptr>& nodes, const Group& group) {
    const MixedPrecisionPolicy policy{
        .param_dtype = group.param_dtype,
        .reduce_dtype = group.reduce_dtype,
        .output_dtype = group.output_dtype,
        .cast_forward_inputs = group.cast_inputs};
    const auto offload =
        group.offload ? AnyOffloadPolicy(CPUOffloadPolicy{}) : AnyOffloadPolicy(OffloadPolicy{});
    if (group.mesh == Mesh::Replicate) {
      return replicate(nodes[0], {.mp_policy = policy, .offload_policy = offload});
    }
    FullyShardOptions options{
        .mp_policy = policy, .offload_policy = offload, .min_shard_numel = group.min_shard_numel};
    if (group.mesh == Mesh::Hsdp) {
      options.mesh = init_device_mesh(torch::kCPU, {case_.ranks / 2, 2}, {"replicate", "shard"});
    }
    if (group.reshard >= 0) {
      options.reshard_after_forward = group.reshard <= 1 ? ReshardAfterForward(group.reshard == 1)
                                                         : ReshardAfterForward(group.reshard);
    }
    if (group.dim > 0) {
      options.shard_placement_fn = [](const std::string&, const at::Tensor& param) {
        return std::optional(ShardPlacement{.dim = param.dim() - 1});
      };
    }
    return nodes.size() == 1 ? fully_shard(nodes[0], options) : fully_shard(nodes, options);
  }

  static std::vector<FSDPModule> list(
      const std::vector<FSDPModule>& handles, const std::vector<int>& groups) {
    std::vector<FSDPModule> result;
    for (const int group : groups) {
      result.push_back(handles[group]);
    }
    return result;
  }

  const Case& case_;
  std::vector<std::optional<FSDPModule>> handles_;
};

} // namespace

std::vector<FSDPModule> shard_model(const Case& c, Node& net) {
  for (auto* node : all_nodes(net)) {
    if (node->block.recomputed) {
      apply_activation_checkpointing(
          *node, {.save = node->block.keeps_matmuls ? save_matmuls() : nullptr});
    }
  }
  return Sharding(c).run(net);
}

namespace {

void follow_policies_below(const Case& c, NodeImpl& node, bool first) {
  const auto& group = c.groups[node.block.group];
  node.casts.params = group.param_dtype;
  if (first) {
    node.casts.inputs = group.cast_inputs ? group.param_dtype : std::nullopt;
    node.casts.outputs = group.output_dtype;
  }
  for (auto& inner : node.nodes) {
    follow_policies_below(c, *inner, inner->block.group != node.block.group);
  }
}

} // namespace

void follow_policies(const Case& c, Node& net) {
  follow_policies_below(c, *net, /*first=*/true);
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const Case& c, const torch::nn::Module& module, bool sharded) {
  using namespace torch::optim;
  const auto params = unique_parameters(module);
  const auto sgd = SGDOptions(0.02).momentum(0.9).weight_decay(0.01);
  const auto adamw = AdamWOptions(0.01).eps(1e-2);
  switch (c.optimizer) {
    case fuzz::Optimizer::Sgd:
      return std::make_unique<SGD>(params, sgd);
    case fuzz::Optimizer::Adam:
      return std::make_unique<Adam>(params, AdamOptions(0.01).eps(1e-2));
    case fuzz::Optimizer::AdamW:
      return std::make_unique<AdamW>(params, adamw);
    case fuzz::Optimizer::FsdpSgd:
      if (sharded) {
        return std::make_unique<optim::SGD>(params, sgd);
      }
      return std::make_unique<SGD>(params, sgd);
    case fuzz::Optimizer::FsdpAdamW:
      if (sharded) {
        return std::make_unique<optim::AdamW>(params, adamw);
      }
      return std::make_unique<AdamW>(params, adamw);
  }
  return nullptr;
}

} // namespace fsdp::cli::fuzz
