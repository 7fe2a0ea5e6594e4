#pragma once

#include <torch/types.h>

#include <cstdint>

namespace fsdp::cli {

/// Chooses the next token by the scores of a model.
class TokenChoice {
 public:
  struct Options {
    double temperature = 0.8; // 0: always the likeliest token
    /// Only the likeliest tokens, whose probabilities together reach this, can be chosen.
    double top_p = 1;
    uint64_t seed = 1;
  };

  explicit TokenChoice(const Options& options);

  /// `scores`: (vocab), on the CPU in fp32.
  int64_t operator()(const torch::Tensor& scores);

 private:
  const Options options_;
  at::Generator generator_;
};

} // namespace fsdp::cli
