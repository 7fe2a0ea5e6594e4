#include "cli/config/presets.h"

#include "cli/check.h"
#include "cli/nearest.h"

namespace fsdp::cli {

namespace {

ModelDims byte_model(int64_t dim, int64_t layers, int64_t heads) {
  return {
      .dim = dim,
      .layers = layers,
      .heads = heads,
      .kv_heads = heads / 2,
      .hidden = default_hidden(dim)};
}

ModelDims llama(int64_t dim, int64_t layers, int64_t heads, int64_t hidden, bool tied) {
  return {
      .vocab = 128256,
      .dim = dim,
      .layers = layers,
      .heads = heads,
      .kv_heads = 8,
      .hidden = hidden,
      .tied = tied,
      .rotary_base = 500000};
}

} // namespace

const std::vector<ModelPreset>& model_presets() {
  static const std::vector<ModelPreset> presets{
      {"tiny", byte_model(128, 4, 4)},
      {"small", byte_model(256, 6, 8)},
      {"medium", byte_model(512, 8, 8)},
      {"large", byte_model(1024, 16, 16)},
      {"1b", llama(2048, 16, 32, 8192, /*tied=*/true)},
      {"3b", llama(3072, 28, 24, 8192, /*tied=*/true)},
      {"8b", llama(4096, 32, 32, 14336, /*tied=*/false)},
      {"70b", llama(8192, 80, 64, 28672, /*tied=*/false)}};
  return presets;
}

const ModelDims& model_preset(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& preset : model_presets()) {
    if (preset.name == name) {
      return preset.dims;
    }
    names.push_back(preset.name);
  }
  throw_config_error("--model ", name, ": there is no such size", did_you_mean(name, names));
}

} // namespace fsdp::cli
