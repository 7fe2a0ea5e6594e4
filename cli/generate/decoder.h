#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "cli/train/model.h"

namespace fsdp::cli {

/// Computes the scores of one token after another. It keeps the keys and values of all tokens, so
/// that each one goes through the model once. The model must be whole: not sharded, not tensor
/// parallel.
class Decoder {
 public:
  /// `most`: how many tokens it has room for.
  Decoder(Transformer model, int64_t most);

  /// How many tokens the model has seen.
  int64_t length() const {
    return length_;
  }
  /// Forgets all tokens.
  void clear() {
    length_ = 0;
  }

  /// Appends tokens and returns the scores (vocab) of the one after them, on the CPU in fp32.
  /// Several tokens can only be the first ones.
  torch::Tensor scores_behind(const std::vector<int64_t>& tokens);

 private:
  /// Attention of a block over what it has kept and what is new. The mask is for the first tokens.
  torch::Tensor attend(size_t block, const torch::Tensor& x, const torch::Tensor& window_mask);

  Transformer model_;
  const int64_t most_;
  int64_t length_ = 0;
  TransformerImpl::Rotary rotary_;           // of all positions
  std::vector<torch::Tensor> keys_, values_; // of each block: (1, kv_heads, most, head_dim)
};

} // namespace fsdp::cli
