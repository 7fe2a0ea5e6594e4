#pragma once

#include <cstdint>
#include <string>

#include "cli/train/plan.h"

namespace fsdp::cli {

/// Bytes of an element of the dtype with this name.
int64_t element_bytes(const std::string& dtype);

/// The number of tokens that a rank computes at once.
int64_t tokens_at_once(const TrainConfig& config, const MeshShape& mesh);

/// Bytes of activations on one rank, of the rows that it computes at once.
struct Activations {
  int64_t block = 0;        // what autograd keeps of a block
  int64_t input = 0;        // what it keeps of a block that is computed again in backward
  int64_t matmuls = 0;      // results of a block's matrix products and attention
  int64_t more_matmuls = 0; // others that autograd itself does not keep
  int64_t unneeded = 0;     // those among `matmuls` that backward does not ask for
  int64_t in_block = 0;     // gradients inside of a block, where they are the most
  int64_t masks = 0;        // of attention; all blocks share them
  int64_t end = 0;          // what it keeps behind the blocks, but for the scores
  int64_t scores = 0;       // log-softmax, its gradient, and that of the scores
};

/// What autograd keeps of the operators of the model, counted by hand.
Activations plan_activations(const TrainConfig& config, const MeshShape& mesh, const PlanFor& what);

/// What a rank keeps of each block until backward.
struct KeptOfBlock {
  int64_t bytes = 0;
  int64_t again = 0; // what is computed again beside it
};

KeptOfBlock kept_of_block(const TrainConfig& config, const Activations& act);

} // namespace fsdp::cli
