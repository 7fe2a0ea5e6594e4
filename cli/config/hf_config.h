#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>

#include "cli/train/model.h"

namespace fsdp::cli {

/// What config.json of a Hugging Face folder says about its model.
struct HfConfig {
  ModelDims dims;
  int64_t longest = 0; // the most tokens that a row may have; 0: not said
};

/// Reads config.json of a folder with a model of the families Llama, Mistral, Qwen2, Qwen3, or
/// Gemma 1 to 3 without images. Throws ConfigError that names the field if the model has anything
/// that Transformer does not compute.
HfConfig read_hf_config(const std::string& folder);

/// The content of a config.json with which Hugging Face's transformers builds the same model.
/// It says that no tokens are special. Throws ConfigError if none of its families builds it.
nlohmann::ordered_json hf_config_json(const ModelDims& dims, int64_t longest);

} // namespace fsdp::cli
