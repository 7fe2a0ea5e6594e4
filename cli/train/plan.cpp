#include "cli/train/plan.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <map>
#include <utility>

#include <fsdp/meta_init.h>
#include <fsdp/muon.h>

#include "cli/train/plan_activations.h"

namespace fsdp::cli {

namespace {

int64_t rounded_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

int64_t reduce_bytes_of(const TrainConfig& config) {
  return element_bytes(config.reduce_dtype.empty() ? config.param_dtype : config.reduce_dtype);
}

/// Over how many ranks a block is divided between forward and backward; 0 if it stays whole.
int64_t ranks_after_forward(const TrainConfig& config, const MeshShape& mesh) {
  const auto shard = static_cast<int>(mesh.shard);
  return config.reshard_after_forward.is_auto() ? shard : config.reshard_after_forward.ranks(shard);
}

/// How tensor parallelism divides a parameter, as `parallelize` does.
enum class Divided { no, rows, columns };

Divided division_of(const std::string& name, const at::Tensor& param) {
  const bool into_residual = is_into_residual(name);
  const bool by_columns = into_residual && !name.ends_with("lora_B.weight");
  const bool by_rows = !into_residual && !name.ends_with("lora_A.weight");
  if (param.dim() > 1) {
    return by_columns ? Divided::columns : by_rows ? Divided::rows : Divided::no;
  }
  return by_rows && name.ends_with("_proj.bias") ? Divided::rows : Divided::no;
}

/// The bytes that all ranks together send to gather a parameter of `rows`, with padding.
int64_t wire_bytes_of(
    const std::string& name,
    int64_t rows,
    int64_t row,
    const MeshShape& mesh,
    const TrainConfig& config) {
  constexpr int64_t kScale = 4; // bytes
  const bool in_float8 = config.has_float8() && name.ends_with("_proj.weight");
  const auto num_scales = config.float8 == "rowwise" ? rows : mesh.shard;
  return in_float8 ? rows * row + num_scales * kScale
                   : rows * row * element_bytes(config.param_dtype);
}

/// Adds a parameter to its group.
void add_param(
    GroupPlan& group,
    const std::string& name,
    const at::Tensor& param,
    const MeshShape& mesh,
    const TrainConfig& config) {
  const auto param_bytes = element_bytes(config.param_dtype);
  const auto divided = division_of(name, param);
  const auto rows = param.size(0) / (divided == Divided::rows ? mesh.tensor : 1);
  const auto row = param.numel() / param.size(0) / (divided == Divided::columns ? mesh.tensor : 1);
  const auto padded = rounded_up(rows, mesh.shard);
  const bool is_trained = param.requires_grad();
  const auto& kept_dtype = is_trained ? config.shard_dtype : config.frozen_dtype();
  const auto shard_bytes = padded / mesh.shard * row * element_bytes(kept_dtype);
  group.numel += param.numel();
  group.shard_bytes += shard_bytes;
  if (is_trained) {
    group.trained_numel += param.numel();
    group.trained_bytes += shard_bytes;
    group.trained_wire_numel += padded * row;
    group.num_trained += 1;
    group.num_divided += divided == Divided::no ? 0 : 1;
    group.replicated_numel += divided == Divided::no ? param.numel() : 0;
  }
  if (param.dim() > 1 && name.starts_with("layers.")) {
    group.muon_numel += param.numel();
    group.muon_bytes += shard_bytes;
  }
  group.gathered_bytes += padded * row * param_bytes;
  group.wire_bytes += wire_bytes_of(name, padded, row, mesh, config);
  group.padding_bytes += (padded - rows) * row * param_bytes;
}

/// The groups that `build_sharded` makes: one per block, and one for the rest. `sharding_plan`
/// would need the mesh to exist, and a plan is made for meshes of any size.
std::vector<GroupPlan> plan_groups(const TrainConfig& config, const MeshShape& mesh) {
  const MetaInit on_meta;
  const Transformer model(config.model);
  std::vector<GroupPlan> groups(model->layers.size() + 1);
  for (size_t i = 0; i < model->layers.size(); ++i) {
    groups[i].name = "layers." + std::to_string(i);
  }
  for (const auto& param : model->named_parameters()) {
    const auto& name = param.key();
    const bool of_block = name.starts_with("layers.");
    auto& group = of_block ? groups[std::stoul(name.substr(7))] : groups.back();
    add_param(group, name, param.value(), mesh, config);
  }
  if (config.offload && config.device != "cpu") {
    auto left = config.device_budget_bytes();
    for (auto& group : groups) { // as DeviceBudget counts
      const auto bytes =
          group.shard_bytes + (1 + config.num_optimizer_states()) * group.trained_bytes;
      group.on_host = bytes > left;
      left -= group.on_host ? 0 : bytes;
    }
  }
  return groups;
}

/// The all-reduces of tensor parallelism in a step: those of `parallelize` and of
/// parallel_cross_entropy.
TrafficPlan plan_tensor_traffic(
    const Plan& plan, const TrainConfig& config, const MeshShape& mesh) {
  TrafficPlan reduces{.op = "all-reduce", .axis = "tp"};
  if (mesh.tensor == 1) {
    return reduces;
  }
  const auto& dims = config.model;
  const auto tokens = tokens_at_once(config, mesh);
  // Forward sums the outputs of attention, feed-forward and embedding. Backward sums the gradients
  // of the inputs of attention, feed-forward and output layer. Recomputing a block repeats only the
  // sum after attention: autograd keeps nothing that comes after the second sum.
  const auto of_block = 4 + (config.activation_checkpointing ? 1 : 0);
  // LoRA leaves the embedding as it is, so the first block's input has no gradient.
  const auto activations = of_block * dims.layers + 2 - (config.has_lora() ? 1 : 0);
  // parallel_cross_entropy makes two all-reduces in fp32: one of the highest score of each token
  // and one number more, and one of three sums per token.
  const auto scores = (tokens + 1 + 3 * tokens) * 4;
  // Norms of queries and keys have the same weight on all ranks, and each has a part of its
  // gradient.
  const auto norms = dims.qk_norm && !config.has_lora() ? 2 * dims.layers : 0;
  // So it is with one of two matrices of LoRA.
  int64_t num_replicas = 0;
  int64_t replicas = 0; // their elements
  for (const auto& group : plan.groups) {
    num_replicas += config.has_lora() ? group.num_trained - group.num_divided : 0;
    replicas += config.has_lora() ? group.replicated_numel : 0;
  }
  const auto elements = activations * tokens * dims.dim + norms * dims.head_dim() + replicas;
  const auto bytes = elements * element_bytes(config.param_dtype) + scores;
  reduces.count = config.accumulate * (activations + norms + num_replicas + 2);
  reduces.bytes = config.accumulate * bytes;
  return reduces;
}

/// The small all-reduces in a step. The loss and two signals are averaged over all ranks. The norm
/// of the gradients takes the norm of each parameter, over each axis that divides it. A step in
/// backward adds up squares, and all ranks share the sum. In fp16 each axis shares whether a
/// gradient is finite. That one is a float, all others are doubles.
TrafficPlan plan_small_traffic(const Plan& plan, const TrainConfig& config, const MeshShape& mesh) {
  TrafficPlan reduces{.op = "all-reduce", .axis = "all"};
  const auto add = [&](bool is_made, int64_t bytes) {
    reduces.count += is_made ? 1 : 0;
    reduces.bytes += is_made ? bytes : 0;
  };
  int64_t num_trained = 0;
  int64_t num_divided = 0;
  for (const auto& group : plan.groups) {
    num_trained += group.num_trained;
    num_divided += group.num_divided;
  }
  add(mesh.ranks() > 1, int64_t{3} * 8);
  if (config.step_in_backward) { // one sum of squares
    add(mesh.ranks() > 1, 8);
  } else {
    add(mesh.shard > 1, num_trained * 8);
    add(mesh.tensor > 1, num_divided * 8);
  }
  for (const auto ranks : {mesh.replicate, mesh.shard, mesh.tensor}) {
    add(ranks > 1 && config.param_dtype == "fp16", 4);
  }
  return reduces;
}

/// What Muon takes of a rank.
struct MuonPlan {
  MuonPlan(const Plan& plan, const TrainConfig& config, const MeshShape& mesh) {
    if (config.optimizer != "muon") {
      return;
    }
    int64_t numel = 0;
    for (const auto& group : plan.groups) {
      numel += group.muon_numel;
      averages -= group.muon_bytes;
      shards += group.muon_bytes;
    }
    const auto bytes = static_cast<int64_t>(c10::elementSize(muon_dtype(config)));
    const auto most = optim::Muon::kExchangeNumel;
    num_exchanges = std::max<int64_t>(1, numel / mesh.ranks() / most);
    const auto held = shards / 4 / num_exchanges;
    const auto owned = bytes * numel / mesh.ranks() / num_exchanges;
    // First the directions, what is sent, what is received, and what was received before. Later all
    // matrices, and for those of one shape the next ones, their products and a polynomial of these.
    const auto sends = (4 + bytes) * held + (mesh.ranks() > 1 ? owned : 0);
    const auto computes =
        owned + bytes * largest_batch(config.model) / mesh.ranks() / num_exchanges;
    in_step = std::max(sends, computes) + (num_exchanges > 1 ? owned : 0);
    // All directions are sent within a replica, and all results to every replica.
    sent_bytes = mesh.ranks() > 1 ? bytes * (shards / 4 + shards / 4 / mesh.replicate) : 0;
  }

  /// Elements of the tensors that Muon needs beside all matrices while it computes those of one
  /// shape: as many as these have, and twice their products with themselves.
  static int64_t largest_batch(const ModelDims& dims) {
    std::map<std::pair<int64_t, int64_t>, int64_t> counts;
    const auto kv = dims.kv_heads * dims.head_dim();
    counts[{dims.dim, dims.dim}] += 2;
    counts[{kv, dims.dim}] += 2;
    counts[{dims.hidden, dims.dim}] += 2;
    counts[{dims.dim, dims.hidden}] += 1;
    int64_t most = 0;
    for (const auto& [shape, count] : counts) {
      const auto few = std::min(shape.first, shape.second);
      most = std::max(most, count * (shape.first * shape.second + 2 * few * few));
    }
    return dims.layers * most;
  }

  int64_t averages = 0; // less than AdamW's
  int64_t shards = 0;   // bytes of parameters that Muon updates
  int64_t num_exchanges = 0;
  int64_t sent_bytes = 0;
  int64_t in_step = 0; // bytes that are needed for a moment
};

std::vector<TrafficPlan> plan_traffic(
    const Plan& plan, const TrainConfig& config, const MeshShape& mesh) {
  const auto reduce_bytes = reduce_bytes_of(config);
  TrafficPlan gathers{.op = "all-gather", .axis = "shard"};
  TrafficPlan scatters{.op = "reduce-scatter", .axis = "shard"};
  TrafficPlan exchanges{.op = "all-to-all", .axis = "shard"}; // instead of them
  TrafficPlan reduces{.op = "all-reduce", .axis = "dp"};
  for (const auto& group : plan.groups) {
    const bool stays = config.reshard_after_forward.is_auto() && group.name.empty(); // the root
    const bool again = !stays && ranks_after_forward(config, mesh) > 0;
    const auto passes = config.accumulate * (again ? 2 : 1);
    if (mesh.shard > 1) {
      gathers.count += passes;
      gathers.bytes += passes * group.wire_bytes;
      auto& reductions = config.sends_bf16() ? exchanges : scatters;
      reductions.count += group.num_trained > 0 ? 1 : 0;
      reductions.bytes += group.trained_wire_numel * (config.sends_bf16() ? 2 : reduce_bytes);
    }
    if (mesh.replicate > 1) {
      reduces.count += group.num_trained > 0 ? 1 : 0;
      reduces.bytes += group.trained_bytes / element_bytes(config.shard_dtype) * reduce_bytes;
    }
  }
  const MuonPlan muon(plan, config, mesh);
  const TrafficPlan matrices{
      .op = "all-to-all",
      .axis = "muon",
      .count = mesh.ranks() > 1 ? 2 * muon.num_exchanges : 0,
      .bytes = muon.sent_bytes};
  std::vector<TrafficPlan> traffic;
  for (const auto& kind :
       {gathers, scatters, exchanges, reduces, matrices, plan_small_traffic(plan, config, mesh),
        plan_tensor_traffic(plan, config, mesh)}) {
    if (kind.count > 0) {
      traffic.push_back(kind);
    }
  }
  return traffic;
}

/// The bytes of AdamW's two moments on one rank.
struct MomentsPlan {
  int64_t bytes = 0;
  int64_t saved_bytes = 0;    // 8-bit ones are saved in bf16
  int64_t unpacked_bytes = 0; // beside them, while a save begins
  int64_t in_step = 0;        // that are needed for a moment
};

MomentsPlan plan_moments(const Plan& plan, const TrainConfig& config) {
  constexpr int64_t kBlock = 256; // elements that share a scale
  const auto numel = 2 * plan.trained_bytes / element_bytes(config.shard_dtype);
  const auto dtype = config.moments_dtype();
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const bool has_scales = dtype == c10::kFloat8_e4m3fn;
  const auto unpacked = has_scales ? 2 * numel : 0;
  // On a GPU the optimizer takes this many elements of a parameter at once, with ten floats each.
  constexpr int64_t kPart = 1 << 22;
  const bool all_on_host = std::all_of(
      plan.groups.begin(), plan.groups.end(), [](const auto& group) { return group.on_host; });
  const bool has_parts = config.is_low_precision() && config.device != "cpu" && !all_on_host;
  return {
      .bytes = bytes + (has_scales ? numel / kBlock * 4 : 0),
      .saved_bytes = has_scales ? unpacked : bytes,
      .unpacked_bytes = unpacked,
      .in_step = has_parts ? 40 * std::min(kPart, numel / 2) : 0};
}

/// The bytes of a group's parameters and gradients on one rank, in the forms that they take.
struct GroupBytes {
  GroupBytes(const GroupPlan& group, const TrainConfig& config, const MeshShape& mesh) {
    const auto param_bytes = element_bytes(config.param_dtype);
    const bool alone = mesh.shard == 1;
    const bool cast = config.param_dtype != config.shard_dtype;
    shard = group.trained_bytes;
    on_device = group.on_host ? 0 : shard;
    grads = group.trained_wire_numel * param_bytes;
    // One rank computes with its shards themselves, unless they have to be cast or moved.
    const bool unpacks = config.has_float8();
    whole = alone && !cast && !group.on_host && !unpacks ? 0 : group.gathered_bytes;
    sent = !alone && cast ? group.gathered_bytes / mesh.shard : 0;
    if (unpacks) { // what a rank sends, and what it receives, which is then unpacked
      sent = group.wire_bytes / mesh.shard + group.wire_bytes;
    }
    const auto to_reduce = group.trained_wire_numel * reduce_bytes_of(config);
    const bool reduces = !alone || mesh.replicate > 1;
    reduced = reduces ? to_reduce + (alone ? 0 : to_reduce / mesh.shard) : 0;
    if (!alone && config.sends_bf16()) { // what is sent, and what is received
      reduced += 2 * group.trained_wire_numel * 2;
    }
    // Gradients are laid out in their own dtype first if the other one is reduced.
    laid_out = reduces && reduce_bytes_of(config) != param_bytes ? grads : 0;
    if (!alone && config.device == "cpu") {
      spare = std::max(whole, config.sends_bf16() ? 0 : to_reduce);
    }
    accumulated = config.accumulate > 1 ? to_reduce : 0;
  }

  int64_t shard = 0;     // of the gradients
  int64_t on_device = 0; // of `shard`, what stays there until the optimizer's step
  int64_t whole = 0;     // the gathered parameters
  int64_t sent = 0;      // the copy of the shard that a gather sends
  int64_t grads = 0;     // as autograd makes them
  int64_t laid_out = 0;  // for a moment, before they are reduced
  int64_t reduced = 0;   // what reduces them: input and output
  int64_t spare = 0;     // kept for the next collective: its whole parameters, or what was reduced
  int64_t accumulated = 0; // of earlier parts, until the last part reduces them
};

/// Follows backward from one block to the one before, and returns the most that is held on top of
/// shards and optimizer. See Note [What a run will take].
int64_t plan_backward(
    const Plan& plan, const TrainConfig& config, const MeshShape& mesh, const Activations& act) {
  const auto layers = config.model.layers;
  std::vector<GroupBytes> blocks;
  for (int64_t i = 0; i < layers; ++i) {
    blocks.emplace_back(plan.groups[static_cast<size_t>(i)], config, mesh);
  }
  const GroupBytes root(plan.groups.back(), config, mesh);
  const auto after_forward = ranks_after_forward(config, mesh);
  const bool keeps = after_forward == 0;
  const bool accumulates = config.accumulate > 1;
  const auto [kept, again] = kept_of_block(config, act);
  const auto grads_of_rows = [&](int64_t rows) { // of a matrix with --dim columns
    const auto numel = rows / mesh.tensor * config.model.dim;
    return config.has_lora() ? 0 : numel * element_bytes(config.param_dtype);
  };
  const auto head_grads = grads_of_rows(config.model.vocab);
  // What waits in memory between a block's forward and its backward.
  const auto after_block = [&](const GroupBytes& block) {
    return keeps ? block.whole : after_forward == mesh.shard ? 0 : block.whole / after_forward;
  };
  int64_t waiting = 0; // of the blocks whose backward has not begun
  for (const auto& block : blocks) {
    waiting += after_block(block) + kept + block.accumulated;
  }
  int64_t finished = 0; // gradients of blocks, but for the one that was reduced last

  // The loss: nothing of backward is there yet.
  auto peak = root.whole + waiting + act.masks + act.end + act.scores + root.accumulated;
  for (auto i = blocks.size(); i-- > 0;) {
    const auto& block = blocks[i];
    const auto* last = i + 1 < blocks.size() ? &blocks[i + 1] : nullptr; // that was reduced
    waiting -= after_block(block) + kept + block.accumulated;
    const auto prefetched = keeps || i == 0 ? 0 : blocks[i - 1].whole + blocks[i - 1].sent;
    // No gather follows the first block's, so nothing takes the memory that is kept then.
    const auto spare = last && i == 0 ? last->spare : 0;
    const auto in_flight = (last ? last->reduced : 0) + spare;
    const auto around = root.whole + (accumulates ? root.accumulated : head_grads) + waiting +
                        prefetched + finished + act.masks;
    // At its beginning all activations of the block are there, at its end all its gradients.
    const auto begins = block.whole + kept + again + act.in_block + block.accumulated + in_flight +
                        grads_of_rows(config.model.hidden);
    const auto ends = block.whole + block.grads + block.accumulated + in_flight;
    // The whole parameters go before gradients are reduced, and so do the buffers of the block
    // before.
    const auto reduces = (accumulates ? block.accumulated : block.grads) + block.laid_out +
                         block.reduced + (last ? last->shard : 0);
    peak = std::max(peak, around + std::max({begins, ends, reduces}));
    finished += last ? last->on_device : 0;
  }
  const auto& first = blocks.front();
  const auto root_grads = accumulates ? root.accumulated : root.grads;
  const auto root_ends = root.whole + root_grads + first.reduced + first.spare;
  const auto root_reduces = first.shard + root_grads + root.laid_out + root.reduced;
  return std::max(peak, finished + std::max(root_ends, root_reduces));
}

} // namespace

Plan make_plan(const TrainConfig& config, const MeshShape& mesh, const PlanFor& what) {
  Plan plan;
  plan.groups = plan_groups(config, mesh);
  for (const auto& group : plan.groups) {
    plan.num_params += group.numel;
    plan.num_trained += group.trained_numel;
    plan.shard_bytes += group.shard_bytes;
    plan.trained_bytes += group.trained_bytes;
    plan.gathered_bytes += group.gathered_bytes;
    plan.padding_bytes += group.padding_bytes;
  }
  plan.traffic = plan_traffic(plan, config, mesh);
  plan.largest_group =
      std::max(plan.groups.front().gathered_bytes, plan.groups.back().gathered_bytes);

  const auto act = plan_activations(config, mesh, what);
  const auto kept = kept_of_block(config, act);
  plan.activation_bytes =
      act.masks + act.end + act.scores + config.model.layers * kept.bytes + kept.again;
  const bool on_cpu = config.device == "cpu";
  const MuonPlan muon(plan, config, mesh);
  const auto moments = plan_moments(plan, config);
  int64_t host_shards = 0;
  int64_t host_grads = 0;
  for (const auto& group : plan.groups) {
    host_shards += group.on_host ? group.shard_bytes : 0;
    host_grads += group.on_host ? group.trained_bytes : 0;
  }
  const auto on_device = [&](int64_t bytes) { // of what all trained parameters have
    const auto part = static_cast<double>(host_grads) / static_cast<double>(plan.trained_bytes);
    return bytes - static_cast<int64_t>(static_cast<double>(bytes) * part);
  };
  const auto averages = moments.bytes + muon.averages;
  const auto state = plan.shard_bytes - host_shards + on_device(averages);
  const auto grads = plan.trained_bytes - host_grads;
  plan.state_bytes = state + grads;
  plan.host_state_bytes = plan.shard_bytes + averages + plan.trained_bytes - plan.state_bytes;
  // The copy that is being written.
  const auto staged =
      what.saves ? (plan.trained_bytes + moments.saved_bytes + muon.averages) / mesh.replicate : 0;
  const auto backward = plan_backward(plan, config, mesh, act);
  // The optimizer's step has all gradients and nothing of backward.
  const auto step = grads + muon.in_step + moments.in_step;
  const auto save = what.saves ? on_device(moments.unpacked_bytes) : 0;
  plan.peak_bytes = state + std::max({backward, step, save}) + (on_cpu ? staged : 0);
  plan.host_bytes = on_cpu ? 0 : staged + plan.host_state_bytes;
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
         {"padding_bytes", group.padding_bytes},
         {"on_host", group.on_host}});
  }
  return json;
}

} // namespace fsdp::cli
