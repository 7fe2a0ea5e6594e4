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
  int64_t wire_bytes = 0;     // what ranks send to gather it, all of them together
  // Of the parameters that are trained. With LoRA these are its matrices alone.
  int64_t trained_numel = 0;
  int64_t trained_bytes = 0;      // of `shard_bytes`
  int64_t trained_wire_numel = 0; // elements of their gradients on one rank, with padding
  int64_t num_trained = 0;        // how many parameters, not their elements
  int64_t num_divided = 0;        // those of them that tensor parallelism divides
  int64_t replicated_numel = 0;   // elements of the others
  int64_t muon_numel = 0;         // elements of the whole parameters that Muon updates
  int64_t muon_bytes = 0;         // of `shard_bytes`
  bool on_host = false;           // where its shards, gradients and optimizer states are
};

/// The collectives of one kind that each rank makes in one step.
struct TrafficPlan {
  std::string op;
  std::string axis; // of the mesh, with its name in --mesh; "all" for loss and norm, "muon" for its
                    // matrices
  int64_t count = 0;
  int64_t bytes = 0; // in all; of input and output the larger one counts
};

/// What a plan is for, beside the configuration.
struct PlanFor {
  bool saves = false;     // on the way, while training goes on
  bool documents = false; // attention stays within documents or examples
};

/// Note [What a run will take]
/// The plan is computed from the sizes of the model, before the model is built. Its peak is what
/// `memory_stats` counts: the tensors of one rank, on the device where it trains.
/// - Shards and the optimizer's averages are always there. A parameter that is trained has two
///   averages, or one if Muon updates it. A save that is under way has a copy of them in host
///   memory, with 8-bit averages in bf16.
/// - Activations are what autograd keeps of the operators of each block, counted by hand. With
///   activation checkpointing it keeps the input of each block, what --keep-matmuls says, and all
///   of the block that backward is at. The masks of windows and documents are there once for
///   all blocks, until backward is through all of them.
/// - The loss has the activations of all blocks, and three tensors of scores in fp32.
/// - Backward goes from the last block to the first. Activations go away, sharded gradients come.
///   Meanwhile there are: this block gathered and the next one, the gradients of this block, the
///   buffers that reduce those of the block before, and the root's parameters. On the CPU, the
///   memory of one more block is kept for the next collective, until there is none.
/// - Gradients that are accumulated stay unsharded until the last part reduces them.
/// - The optimizer's step has the sharded gradients of all blocks. Muon's also has whole matrices,
///   and parts of others that are being sent.
/// The peak is the largest of these moments. tests/cli/planned_peak_test.cpp measures it.
struct Plan {
  int64_t num_params = 0;
  int64_t num_trained = 0; // of them
  std::vector<GroupPlan> groups;
  std::vector<TrafficPlan> traffic;
  int64_t shard_bytes = 0;
  int64_t trained_bytes = 0;  // of them, those of parameters that are trained
  int64_t gathered_bytes = 0; // of all groups together
  int64_t padding_bytes = 0;
  int64_t largest_group = 0;    // gathered bytes of the largest group
  int64_t state_bytes = 0;      // shards, gradients and optimizer, on the device
  int64_t host_state_bytes = 0; // the same, of groups that are offloaded to the host
  int64_t activation_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t host_bytes = 0; // in the host's memory, if the rank trains on another device
};

Plan make_plan(const TrainConfig& config, const MeshShape& mesh, const PlanFor& what = {});
/// The groups as the content of groups.json.
nlohmann::ordered_json groups_json(const Plan& plan);

} // namespace fsdp::cli
