#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "cli/config/train_config.h"

namespace fsdp::cli {

/// A group of parameters that are gathered together. Bytes are those of one rank.
struct GroupPlan {
  std::string name;           // "layers.0", "" for the root
  int64_t numel = 0;          // elements of the whole parameters
  int64_t shard_bytes = 0;    // while sharded, on the rank with the most
  int64_t gathered_bytes = 0; // while gathered, in the dtype of compute, with padding
  int64_t padding_bytes = 0;  // the padding in `gathered_bytes`
};

/// The collectives of one kind that each rank makes in one step.
struct TrafficPlan {
  std::string op;
  std::string axis; // of the mesh, with its name in --mesh
  int64_t count = 0;
  int64_t bytes = 0; // in all; of input and output the larger one counts
};

/// Note [What a run will take]
/// The plan is computed from the sizes of the model, before the model is built. The peak is FSDP2's
/// own bound plus the optimizer's state: forward holds a block gathered, its copy, and the next
/// block gathered; backward also holds the gradients of a block. Activations are an estimate: they
/// are what autograd keeps of the operators of a block, counted by hand.
struct Plan {
  int64_t num_params = 0;
  std::vector<GroupPlan> groups;
  std::vector<TrafficPlan> traffic;
  int64_t shard_bytes = 0;
  int64_t gathered_bytes = 0; // of all groups together
  int64_t padding_bytes = 0;
  int64_t largest_group = 0; // gathered bytes of the largest group
  int64_t state_bytes = 0;   // shards, gradients and optimizer
  int64_t activation_bytes = 0;
  int64_t peak_bytes = 0;
};

Plan make_plan(const TrainConfig& config, const MeshShape& mesh);
/// The groups as the content of groups.json.
nlohmann::ordered_json groups_json(const Plan& plan);

} // namespace fsdp::cli
