#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "cli/config/train_config.h"

namespace fsdp::cli {

/// Parameters that are gathered together. Bytes are those of one rank.
struct GroupPlan {
  std::string name;           // "layers.0", "" for the root
  int64_t numel = 0;          // whole, over all ranks
  int64_t shard_bytes = 0;    // at rest, on the rank with the most
  int64_t gathered_bytes = 0; // whole, in the dtype of compute, with padding
  int64_t padding_bytes = 0;  // of that
};

/// Collectives of one kind in one step, as each rank makes them.
struct TrafficPlan {
  std::string op;
  std::string axis; // of the mesh, as --mesh calls it
  int64_t count = 0;
  int64_t bytes = 0; // of the larger buffers
};

/// Note [What a run will take]
/// By the sizes of the model alone, before there is one. Peaks are FSDP2's own
/// bounds (three blocks' worth in forward: gathered, copied out, and the next one;
/// in backward a fourth, of gradients), with the optimizer's state beside them;
/// activations are what autograd keeps of the operators of a block, counted by
/// hand, so they are an estimate.
struct Plan {
  int64_t num_params = 0;
  std::vector<GroupPlan> groups;
  std::vector<TrafficPlan> traffic;
  int64_t shard_bytes = 0;
  int64_t gathered_bytes = 0; // of all groups together
  int64_t padding_bytes = 0;
  int64_t largest_group = 0; // the most that is gathered for one block
  int64_t state_bytes = 0;   // shards, gradients and optimizer
  int64_t activation_bytes = 0;
  int64_t peak_bytes = 0;
};

Plan make_plan(const TrainConfig& config, const MeshShape& mesh);
/// As groups.json has them.
nlohmann::ordered_json groups_json(const Plan& plan);

} // namespace fsdp::cli
