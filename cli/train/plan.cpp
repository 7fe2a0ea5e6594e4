#include "cli/train/plan.h"

#include <c10/core/ScalarType.h>

#include <algorithm>

#include <fsdp/meta_init.h>

namespace fsdp::cli {

namespace {

int64_t rounded_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

int64_t bytes_of(const std::string& dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype_of(dtype)));
}

/// Adds a parameter to its group. Tensor parallelism divides the columns of the projections back
/// into the residual stream, and the rows of the other matrices; see `parallelize`.
void add_param(
    GroupPlan& group,
    const std::string& name,
    const at::Tensor& param,
    const MeshShape& mesh,
    int64_t param_bytes) {
  const bool is_divided = param.dim() > 1;
  const bool by_columns = name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
  const auto rows = is_divided && !by_columns ? param.size(0) / mesh.tensor : param.size(0);
  const auto row = param.numel() / param.size(0) / (by_columns ? mesh.tensor : 1);
  const auto padded = rounded_up(rows, mesh.shard);
  group.numel += param.numel();
  group.shard_bytes += padded / mesh.shard * row * 4;
  group.gathered_bytes += padded * row * param_bytes;
  group.padding_bytes += (padded - rows) * row * param_bytes;
}

/// The groups that `build_sharded` makes: one per block, and one for the rest.
std::vector<GroupPlan> plan_groups(
    const ModelDims& dims, const MeshShape& mesh, int64_t param_bytes) {
  const MetaInit on_meta;
  const Transformer model(dims);
  std::vector<GroupPlan> groups(static_cast<size_t>(dims.layers) + 1);
  for (size_t i = 0; i < model->layers.size(); ++i) {
    groups[i].name = "layers." + std::to_string(i);
  }
  for (const auto& param : model->named_parameters()) {
    const auto& name = param.key();
    const bool of_block = name.starts_with("layers.");
    auto& group = of_block ? groups[std::stoul(name.substr(7))] : groups.back();
    add_param(group, name, param.value(), mesh, param_bytes);
  }
  return groups;
}

/// The number of tokens that a rank computes at once.
int64_t tokens_of_a_part(const TrainConfig& config, const MeshShape& mesh) {
  return config.batch / mesh.data_ranks() / config.accumulate * config.context;
}

/// The all-reduces of tensor parallelism in a step: those of `parallelize` and of
/// parallel_cross_entropy.
TrafficPlan plan_tensor_traffic(const TrainConfig& config, const MeshShape& mesh) {
  TrafficPlan reduces{.op = "all-reduce", .axis = "tp"};
  if (mesh.tensor == 1) {
    return reduces;
  }
  const auto& dims = config.model;
  const auto tokens = tokens_of_a_part(config, mesh);
  // Forward sums the outputs of attention, feed-forward and embedding. Backward sums the gradients
  // of the inputs of attention, feed-forward and output layer. Recomputing a block repeats only the
  // sum after attention: autograd keeps nothing that comes after the second sum.
  const auto of_block = 4 + (config.activation_checkpointing ? 1 : 0);
  const auto activations = of_block * dims.layers + 2;
  // parallel_cross_entropy makes two all-reduces in fp32: one of the highest score of each token
  // and one number more, and one of three sums per token.
  const auto scores = (tokens + 1 + 3 * tokens) * 4;
  const auto bytes = activations * tokens * dims.dim * bytes_of(config.param_dtype) + scores;
  reduces.count = config.accumulate * (activations + 2);
  reduces.bytes = config.accumulate * bytes;
  return reduces;
}

std::vector<TrafficPlan> plan_traffic(
    const Plan& plan, const TrainConfig& config, const MeshShape& mesh, int64_t reduce_bytes) {
  TrafficPlan gathers{.op = "all-gather", .axis = "shard"};
  TrafficPlan scatters{.op = "reduce-scatter", .axis = "shard"};
  TrafficPlan reduces{.op = "all-reduce", .axis = "dp"};
  const auto param_bytes = bytes_of(config.param_dtype);
  for (const auto& group : plan.groups) {
    const bool is_root = group.name.empty();
    const bool again = config.reshard_after_forward.is_auto()
                           ? !is_root
                           : config.reshard_after_forward.ranks(static_cast<int>(mesh.shard)) > 0;
    const auto passes = config.accumulate * (again ? 2 : 1);
    if (mesh.shard > 1) {
      gathers.count += passes;
      gathers.bytes += passes * group.gathered_bytes;
      scatters.count += 1;
      scatters.bytes += group.gathered_bytes / param_bytes * reduce_bytes;
    }
    if (mesh.replicate > 1) {
      reduces.count += 1;
      reduces.bytes += group.shard_bytes / 4 * reduce_bytes;
    }
  }
  std::vector<TrafficPlan> traffic;
  for (const auto& kind : {gathers, scatters, reduces, plan_tensor_traffic(config, mesh)}) {
    if (kind.count > 0) {
      traffic.push_back(kind);
    }
  }
  return traffic;
}

/// See Note [What a run will take].
int64_t estimate_activations(const TrainConfig& config, const MeshShape& mesh) {
  const auto& dims = config.model;
  const auto tokens = tokens_of_a_part(config, mesh);
  const auto heads = (dims.heads + 2 * dims.kv_heads) * dims.head_dim() / mesh.tensor;
  // Inputs and outputs of two norms, projections before and after the rotation, the output of
  // attention, and the four tensors of SwiGLU.
  const auto block = 5 * dims.dim + 3 * heads + 4 * dims.hidden / mesh.tensor;
  const auto kept =
      config.activation_checkpointing ? dims.layers * dims.dim + block : dims.layers * block;
  const auto scores = 3 * dims.vocab / mesh.tensor; // scores, softmax and gradient, in fp32
  return tokens * (kept * bytes_of(config.param_dtype) + scores * 4);
}

} // namespace

Plan make_plan(const TrainConfig& config, const MeshShape& mesh) {
  Plan plan;
  const auto param_bytes = bytes_of(config.param_dtype);
  const auto reduce_bytes =
      config.reduce_dtype.empty() ? param_bytes : bytes_of(config.reduce_dtype);
  plan.groups = plan_groups(config.model, mesh, param_bytes);
  for (const auto& group : plan.groups) {
    plan.num_params += group.numel;
    plan.shard_bytes += group.shard_bytes;
    plan.gathered_bytes += group.gathered_bytes;
    plan.padding_bytes += group.padding_bytes;
  }
  plan.traffic = plan_traffic(plan, config, mesh, reduce_bytes);

  const auto block = plan.groups.front().gathered_bytes;
  const auto root = plan.groups.back().gathered_bytes;
  plan.largest_group = std::max(block, root);
  const bool keeps = !config.reshard_after_forward.is_auto() &&
                     config.reshard_after_forward.ranks(static_cast<int>(mesh.shard)) == 0;
  const auto shard = plan.shard_bytes;
  plan.state_bytes = config.offload ? 0 : 4 * shard; // offload keeps it on the host
  plan.activation_bytes = estimate_activations(config, mesh);
  // Gradients that are accumulated stay unsharded until the last part reduces them.
  const auto whole_grads =
      config.accumulate > 1 ? plan.gathered_bytes / param_bytes * reduce_bytes : 0;
  const auto in_backward = (keeps ? plan.gathered_bytes + block : 3 * block + root) +
                           block / param_bytes * reduce_bytes + whole_grads;
  plan.peak_bytes = plan.state_bytes + in_backward + plan.activation_bytes;
  return plan;
}

nlohmann::ordered_json groups_json(const Plan& plan) {
  auto json = nlohmann::ordered_json::array();
  for (const auto& group : plan.groups) {
    json.push_back(
        {{"name", group.name},
         {"numel", group.numel},
         {"shard_bytes", group.shard_bytes},
         {"gathered_bytes", group.gathered_bytes},
         {"padding_bytes", group.padding_bytes}});
  }
  return json;
}

} // namespace fsdp::cli
