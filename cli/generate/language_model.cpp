#include "cli/generate/language_model.h"

#include <fsdp/checkpoint.h>
#include <fsdp/meta_init.h>
#include <fsdp/state_dict.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "cli/check.h"
#include "cli/config/adapter_config.h"
#include "cli/config/hf_config.h"
#include "cli/files.h"
#include "cli/json_text.h"
#include "cli/text/documents.h"
#include "cli/train/pretrained.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::json;

/// Of a model whose config.json names no longest row.
constexpr int64_t kAnyLength = 1 << 30;

/// config.json of a run has no such field.
bool is_hf_folder(const std::string& path) {
  return is_folder(path) && read_object(path + "/config.json").contains("model_type");
}

/// The tokens that end a text: one number, or a list of them.
std::set<int64_t> end_tokens(const std::string& folder) {
  for (const auto* file : {"/generation_config.json", "/config.json"}) {
    const auto end = read_object(folder + file).value("eos_token_id", Json());
    if (end.is_number_integer()) {
      return {end.get<int64_t>()};
    }
    if (end.is_array() &&
        std::all_of(end.begin(), end.end(), [](const Json& x) { return x.is_number_integer(); })) {
      return end.get<std::set<int64_t>>();
    }
  }
  return {};
}

} // namespace

std::vector<int64_t> LanguageModel::encode(std::string_view text) const {
  std::vector<int64_t> tokens;
  if (tokenizer) {
    tokens = tokenizer->prefix();
    const auto more = tokenizer->encode(text);
    tokens.insert(tokens.end(), more.begin(), more.end());
  } else {
    for (const char c : text) {
      tokens.push_back(static_cast<unsigned char>(c));
    }
  }
  for (const auto token : tokens) {
    check_config(
        token < dims.vocab, "the text has the token ", token, " ('", bytes_of(token),
        "'), but the model has only ", dims.vocab);
  }
  return tokens;
}

std::string LanguageModel::bytes_of(int64_t token) const {
  return tokenizer ? tokenizer->bytes_of(token) : std::string{static_cast<char>(token)};
}

torch::Tensor LanguageModel::meaningless() const {
  auto result = torch::empty({dims.vocab}, torch::kBool);
  auto* const values = result.data_ptr<bool>();
  for (int64_t token = 0; token < dims.vocab; ++token) {
    values[token] = tokenizer ? !tokenizer->has(token) : token >= 256;
  }
  return result;
}

LanguageModel find_language_model(
    const std::string& path, const std::string& tokenizer, bool needed) {
  LanguageModel result;
  std::string folder; // whose tokens the model has
  if (is_hf_folder(path) || is_adapter_folder(path)) {
    auto lora = std::string("none");
    folder = path;
    if (is_adapter_folder(path)) {
      const auto found = read_adapter_config(path);
      lora = found.lora.str();
      folder = found.base;
      result.adapter = path;
    }
    const auto config = read_hf_config(folder);
    check_weight_files(folder);
    check_weights_fit(config.dims, folder);
    result.dims = config.dims;
    result.dims.lora = lora;
    result.longest = config.longest > 0 ? config.longest : kAnyLength;
    result.folder = folder;
  } else {
    result.run = find_saved_run(path, "--checkpoint", /*model_only=*/true);
    warn_of_skipped(*result.run);
    const auto& config = result.run->identity.config;
    result.dims = config.model;
    result.longest = config.context;
    folder = config.from;
    check_weights(*result.run, config.from);
    if (config.has_lora()) {
      result.folder = config.from;
    }
  }
  if (!folder.empty()) {
    result.ends = end_tokens(folder);
  }
  const bool of_bytes = tokenizer == "bytes" || (tokenizer.empty() && result.dims.vocab == 256 &&
                                                 !Tokenizer::is_in(folder));
  folder = tokenizer.empty() ? folder : tokenizer;
  if (!folder.empty() && !of_bytes) {
    try {
      check_config(
          Tokenizer::is_in(folder), "there is no tokenizer.json in ", folder,
          "; --tokenizer names a folder that has it, or bytes");
      result.tokenizer = Tokenizer::read(folder);
      result.end = end_token(*result.tokenizer, folder);
      if (result.ends.empty() && result.end) {
        result.ends = {*result.end};
      }
    } catch (const ConfigError&) {
      if (needed) {
        throw;
      }
    }
  }
  return result;
}

void LanguageModel::load(Transformer& model) const {
  if (!folder.empty()) {
    load_pretrained(model, folder);
  }
  if (run) {
    StateDict state;
    state.insert_all(get_model_state_dict(model, {.ignore_frozen_params = true}), "model.");
    fsdp::load(state, run->path);
  }
  if (!adapter.empty()) {
    load_adapter(model, adapter);
  }
}

Transformer load_whole(const LanguageModel& language, c10::ScalarType dtype) {
  Transformer model{nullptr};
  {
    const MetaInit on_meta;
    model = Transformer(language.dims);
    model->to(dtype);
  }
  to_empty(model, torch::kCPU);
  language.load(model);
  return model;
}

} // namespace fsdp::cli
