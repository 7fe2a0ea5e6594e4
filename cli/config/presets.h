#pragma once

#include <string>
#include <vector>

#include "cli/train/model.h"

namespace fsdp::cli {

/// The sizes of a model under a name. "tiny" trains in a minute on two cores. The presets from "1b"
/// on have the sizes and the vocabulary of Llama 3; bytes use the first 256 of its tokens.
struct ModelPreset {
  std::string name;
  ModelDims dims;
};

const std::vector<ModelPreset>& model_presets();

/// Throws ConfigError with the nearest name if there is no such preset.
const ModelDims& model_preset(const std::string& name);

} // namespace fsdp::cli
