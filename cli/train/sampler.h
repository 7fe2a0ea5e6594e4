#pragma once

#include <cstdint>
#include <string>

#include "cli/train/model.h"

namespace fsdp::cli {

struct SampleOptions {
  int64_t count = 240;      // bytes to draw
  double temperature = 0.8; // 0: always the likeliest
  uint64_t seed = 1;
  int64_t context = 128; // the model sees the last so many
  c10::Device device = c10::kCPU;
  /// False: this rank only takes part in gathering, and what it draws is no text.
  bool wanted = true;
};

/// `prompt` and bytes that the model drew to follow it. Collective over the ranks
/// that the model lies on; those that share a batch want the same.
std::string sample(Transformer& model, const std::string& prompt, const SampleOptions& options);

} // namespace fsdp::cli
