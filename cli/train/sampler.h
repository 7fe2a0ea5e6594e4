#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cli/train/model.h"

namespace fsdp::cli {

struct SampleOptions {
  int64_t count = 0; // bytes to draw
  uint64_t seed = 1;
  int64_t context = 128; // how many of the last bytes the model sees
  c10::Device device = c10::kCPU;
  /// If false, this rank only takes part in the collectives, and its result is meaningless.
  bool keeps_text = true;
  /// Is called before each byte. If it returns true, on every rank alike, no more bytes are drawn.
  std::function<bool()> stop = [] { return false; };
};

/// Returns `prompt`, followed by bytes that the model generates. Collective over the ranks of the
/// model. The ranks of the tensor axis must have the same `keeps_text`.
std::string sample(Transformer& model, const std::string& prompt, const SampleOptions& options);

} // namespace fsdp::cli
