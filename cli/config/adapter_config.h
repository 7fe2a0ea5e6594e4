#pragma once

#include <nlohmann/json.hpp>

#include <string>

#include "cli/train/lora.h"

namespace fsdp::cli {

/// What adapter_config.json of a folder of PEFT says.
struct AdapterConfig {
  Lora lora;
  std::string base; // the Hugging Face folder of the model to which the matrices belong
};

bool is_adapter_folder(const std::string& path);

/// Throws ConfigError that names the field if the adapter has anything that Lora lacks.
AdapterConfig read_adapter_config(const std::string& folder);

/// The content of an adapter_config.json with which Python's peft builds the same matrices.
nlohmann::ordered_json adapter_config_json(const AdapterConfig& config);

} // namespace fsdp::cli
