#include "cli/config/adapter_config.h"

#include <set>
#include <vector>

#include "cli/check.h"
#include "cli/config/json_fields.h"
#include "cli/files.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFile = "/adapter_config.json";

/// Fields that do not change what the matrices mean.
const std::set<std::string> kHarmlessInAdapters{
    "auto_mapping",  "corda_config",   "ensure_weight_tying",
    "eva_config",    "inference_mode", "layers_pattern",
    "loftq_config",  "lora_dropout",   "lora_ga_config",
    "megatron_core", "peft_version",   "qalora_group_size",
    "revision",      "runtime_config", "task_type"};

} // namespace

bool is_adapter_folder(const std::string& path) {
  return is_file(path + kFile);
}

AdapterConfig read_adapter_config(const std::string& folder) {
  auto fields = JsonFields::read(folder + kFile);
  fields.expect<std::string>("peft_type", "LORA");
  fields.expect<std::string>("bias", "none");
  for (const auto* feature :
       {"fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_rslora"}) {
    fields.expect<bool>(feature, false);
  }
  for (const auto* changes : {"alpha_pattern", "rank_pattern"}) { // for some projections
    fields.expect<Json>(changes, Json::object());
  }
  // Others also change the weights that the matrices belong to.
  const auto init = fields.get<Json>("init_lora_weights", true);
  check_config(
      init.is_boolean() || init == "gaussian" || init == "orthogonal" || init == "eva",
      fields.file(), ": \"init_lora_weights\" is ", init.dump(), ", which is not supported");
  AdapterConfig config;
  config.lora.rank = fields.require<int64_t>("r");
  config.lora.alpha = fields.require<double>("lora_alpha");
  const auto targets = fields.require<Json>("target_modules");
  if (targets == "all-linear") {
    config.lora.targets = lora_projections();
  } else {
    check_config(
        targets.is_array(), fields.file(), ": \"target_modules\" is ", targets.dump(),
        "; only a list of names is supported, or \"all-linear\"");
    config.lora.targets = fields.require<std::vector<std::string>>("target_modules");
  }
  config.lora.check(fields.file());
  config.base = fields.require<std::string>("base_model_name_or_path");
  fields.check_all_read(kHarmlessInAdapters);
  check_config(
      is_folder(config.base), fields.file(), ": \"base_model_name_or_path\" is ",
      Json(config.base).dump(), ", and there is no such folder here");
  return config;
}

nlohmann::ordered_json adapter_config_json(const AdapterConfig& config) {
  return {
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", config.base},
      {"r", config.lora.rank},
      {"lora_alpha", config.lora.alpha},
      {"target_modules", config.lora.targets},
      {"lora_dropout", 0.0},
      {"bias", "none"},
      {"fan_in_fan_out", false},
      {"inference_mode", true}};
}

} // namespace fsdp::cli
