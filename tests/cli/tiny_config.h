#pragma once

// A text and a model that a trainer learns in a moment.

#include <string>

#include "cli/config/train_config.h"

namespace fsdp::cli {

inline std::string sample_text(int lines = 400) {
  std::string text;
  for (int i = 0; i < lines; ++i) {
    text += "for (int i = 0; i < " + std::to_string(i) + "; ++i) total += row[i];\n";
  }
  return text;
}

inline TrainConfig tiny_config() {
  TrainConfig config;
  config.model = {.dim = 16, .layers = 2, .heads = 4, .kv_heads = 2, .hidden = 32};
  config.context = 16;
  config.batch = 8;
  config.steps = 12;
  config.schedule.lr = 1e-2;
  return config;
}

} // namespace fsdp::cli
