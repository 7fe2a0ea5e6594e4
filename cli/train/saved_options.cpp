#include <fstream>

#include "cli/check.h"
#include "cli/config/option_list.h"
#include "cli/files.h"
#include "cli/report/report.h"
#include "cli/train/folder_options.h"
#include "cli/train/options.h"

namespace fsdp::cli {

nlohmann::ordered_json config_json(const TrainOptions& options) {
  nlohmann::ordered_json json;
  const auto& config = options.identity.config;
  for_each_option([&](const char* name, auto in, bool) {
    const std::string key = name;
    if (key != "beta1" && key != "beta2") { // --betas is one option for both
      json[key] = in(config);
    }
  });
  json["betas"] = {config.beta1, config.beta2};
  // An empty or negative value stands for a default. Users do not type it, so it is left out.
  for (const auto* open : {"min-lr", "warmup"}) {
    if (json[open] == -1) {
      json.erase(open);
    }
  }
  if (config.reduce_dtype.empty()) {
    json.erase("reduce-dtype");
  }
  if (config.from.empty()) {
    json.erase("from");
  }
  if (!options.identity.data.empty()) {
    json["data"] = options.identity.data;
  }
  json["mesh"] = config.mesh.value_or(MeshShape{}).str();
  json["save-every"] = options.save_every.value_or(0);
  for_each_folder_option([&](const char* name, auto in) { json[name] = in(options); });
  return json;
}

std::optional<TrainOptions> read_config_json(const std::filesystem::path& run) {
  const auto path = run / kConfigFile;
  if (!is_file(path)) {
    return std::nullopt;
  }
  TrainOptions options;
  auto& config = options.identity.config;
  try {
    const auto json = nlohmann::ordered_json::parse(std::ifstream(path));
    const auto take = [&](const char* name, auto& value) {
      if (json.contains(name)) { // `config_json` left out values that stand for a default
        value = json.at(name).get<std::decay_t<decltype(value)>>();
      }
    };
    for_each_option([&](const char* name, auto in, bool) { take(name, in(config)); });
    config.beta1 = json.at("betas").at(0);
    config.beta2 = json.at("betas").at(1);
    take("data", options.identity.data);
    take("mesh", options.mesh);
    options.save_every = json.at("save-every").get<int64_t>();
    for_each_folder_option([&](const char* name, auto in) { take(name, in(options)); });
  } catch (const nlohmann::json::exception& error) {
    throw_checkpoint_error(
        path.string(),
        " is not a file of fsdp train; remove it to continue from the newest checkpoint: ",
        error.what());
  }
  return options;
}

SavedRun run_without_checkpoint(const TrainOptions& before, const std::filesystem::path& run) {
  return {
      .path = run,
      .has_checkpoint = false,
      .is_latest = true,
      .identity = before.identity,
      .ranks = parse_mesh(before.mesh, std::nullopt).ranks(),
      .mesh = before.mesh,
      .skipped = skipped_checkpoints(checkpoints_of(run.string()), -1)};
}

} // namespace fsdp::cli
