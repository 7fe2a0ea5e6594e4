#include "cli/train/plan.h"

#include <c10/core/ScalarType.h>

#include <algorithm>

namespace fsdp::cli {

namespace {

/// The size of a weight: the number of rows, and the elements in a row.
struct Matrix {
  int64_t rows = 0;
  int64_t row = 1;
};

int64_t rounded_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

int64_t bytes_of(const std::string& dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype_of(dtype)));
}

/// The parts of a block's weights that one rank has under tensor parallelism.
std::vector<Matrix> block_weights(const ModelDims& dims, int64_t tensor) {
  const auto query = dims.heads * dims.head_dim() / tensor;
  const auto key = dims.kv_heads * dims.head_dim() / tensor;
  const auto hidden = dims.hidden / tensor;
  return {{dims.dim},         {dims.dim},         {query, dims.dim},
          {key, dims.dim},    {key, dims.dim},    {dims.dim, query},
          {hidden, dims.dim}, {hidden, dims.dim}, {dims.dim, hidden}};
}

std::vector<Matrix> root_weights(const ModelDims& dims, int64_t tensor) {
  std::vector<Matrix> weights{{dims.vocab / tensor, dims.dim}, {dims.dim}};
  if (!dims.tied) {
    weights.push_back(weights.front());
  }
  return weights;
}

int64_t numel_of(const std::vector<Matrix>& weights) {
  int64_t numel = 0;
  for (const auto& weight : weights) {
    numel += weight.rows * weight.row;
  }
  return numel;
}

GroupPlan plan_group(
    std::string name, const std::vector<Matrix>& weights, int64_t shards, int64_t param_bytes) {
  GroupPlan group{.name = std::move(name)};
  for (const auto& [rows, row] : weights) {
    const auto padded = rounded_up(rows, shards);
    group.shard_bytes += padded / shards * row * 4;
    group.gathered_bytes += padded * row * param_bytes;
    group.padding_bytes += (padded - rows) * row * param_bytes;
  }
  return group;
}

int64_t count_params(const ModelDims& dims) {
  return dims.layers * numel_of(block_weights(dims, 1)) + numel_of(root_weights(dims, 1));
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
  const auto& dims = config.model;
  const auto param_bytes = bytes_of(config.param_dtype);
  const auto reduce_bytes =
      config.reduce_dtype.empty() ? param_bytes : bytes_of(config.reduce_dtype);
  plan.num_params = count_params(dims);
  for (int64_t i = 0; i < dims.layers; ++i) {
    plan.groups.push_back(plan_group(
        "layers." + std::to_string(i), block_weights(dims, mesh.tensor), mesh.shard, param_bytes));
  }
  plan.groups.push_back(plan_group("", root_weights(dims, mesh.tensor), mesh.shard, param_bytes));
  for (auto& group : plan.groups) { // the elements on all ranks together
    group.numel = numel_of(group.name.empty() ? root_weights(dims, 1) : block_weights(dims, 1));
  }
  for (const auto& group : plan.groups) {
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
