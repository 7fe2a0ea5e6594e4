#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::cli {

/// How rotary positions are stretched, so that a model takes more tokens than it was trained with.
struct RotaryScaling {
  double factor = 1;
  /// For Llama 3: slow rotations are divided by `factor`, quick ones are left as they are, and
  /// those between `low` and `high` turns over `original` tokens are mixed. If `original` is 0, all
  /// are divided.
  double low = 0;
  double high = 0;
  int64_t original = 0;

  /// "linear:FACTOR" or "llama3:FACTOR,LOW,HIGH,ORIGINAL".
  std::string str() const;
  /// Reads what `str` returned. Nothing for "none". Throws ConfigError that names --rotary-scaling
  /// if the text is something else.
  static std::optional<RotaryScaling> parse(const std::string& text);
};

/// Cosines and sines of the angles of every position: (2, time, head_dim / 2).
torch::Tensor rotary_table(
    int64_t time,
    int64_t head_dim,
    double base,
    const std::string& scaling,
    const torch::Tensor& like);

/// Rotates the pairs (i, i + head_dim / 2) of `x`, which is (batch, heads, time, head_dim).
torch::Tensor rotate(const torch::Tensor& x, const torch::Tensor& rotary);

} // namespace fsdp::cli
