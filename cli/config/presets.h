#pragma once

#include <string>
#include <vector>

#include "cli/train/model.h"

namespace fsdp::cli {

/// Sizes by name: "tiny" trains in a minute on two cores; those from "1b" on are
/// Llama 3's, with its vocabulary, of which bytes use the first 256.
struct ModelPreset {
  std::string name;
  ModelDims dims;
};

const std::vector<ModelPreset>& model_presets();

/// Throws ConfigError that names --model and the nearest name.
const ModelDims& model_preset(const std::string& name);

} // namespace fsdp::cli
