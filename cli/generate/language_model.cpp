#include "cli/generate/language_model.h"

#include <fsdp/checkpoint.h>
#include <fsdp/meta_init.h>
#include <fsdp/state_dict.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "cli/check.h"
#include "cli/config/hf_config.h"
#include "cli/files.h"
#include "cli/train/pretrained.h"
#include "cli/train/run_checkpoint.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::json;

Json read_json(const std::string& path) {
  const auto text = read_file(path);
  const auto json = Json::parse(text.value_or("{}"), nullptr, /*allow_exceptions=*/false);
  return json.is_object() ? json : Json::object();
}

/// config.json of a run has no such field.
bool is_hf_folder(const std::string& path) {
  return is_folder(path) && read_json(path + "/config.json").contains("model_type");
}

/// The tokens that end a text: one number, or a list of them.
std::set<int64_t> end_tokens(const std::string& folder) {
  for (const auto* file : {"/generation_config.json", "/config.json"}) {
    const auto end = read_json(folder + file).value("eos_token_id", Json());
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

Transformer empty_model(const ModelDims& dims, c10::ScalarType dtype) {
  Transformer model{nullptr};
  {
    const MetaInit on_meta;
    model = Transformer(dims);
    model->to(dtype);
  }
  to_empty(model, torch::kCPU);
  return model;
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
  return tokens;
}

std::string LanguageModel::bytes_of(int64_t token) const {
  return tokenizer ? tokenizer->bytes_of(token) : std::string{static_cast<char>(token)};
}

int64_t LanguageModel::vocab() const {
  return std::min(model->dims.vocab, tokenizer ? tokenizer->vocab() : int64_t{256});
}

LanguageModel load_language_model(
    const std::string& path, const std::string& tokenizer, c10::ScalarType dtype) {
  LanguageModel result;
  auto folder = tokenizer;
  if (is_hf_folder(path)) {
    const auto config = read_hf_config(path);
    check_weight_files(path);
    result.model = empty_model(config.dims, dtype);
    load_pretrained(result.model, path);
    result.longest = config.longest;
    result.ends = end_tokens(path);
    folder = folder.empty() ? path : folder;
  } else {
    const auto saved = find_saved_run(path, "--checkpoint", /*model_only=*/true);
    warn_of_skipped(saved);
    const auto& config = saved.identity.config;
    result.model = empty_model(config.model, dtype);
    StateDict state;
    state.insert_all(get_model_state_dict(result.model), "model.");
    load(state, saved.path);
    result.longest = config.context;
    if (!config.from.empty()) {
      result.ends = end_tokens(config.from);
      folder = folder.empty() ? config.from : folder;
    }
  }
  const bool of_bytes = tokenizer.empty() && result.model->dims.vocab == 256;
  if (!folder.empty() && tokenizer != "bytes" && !(of_bytes && !Tokenizer::is_in(folder))) {
    check_config(
        Tokenizer::is_in(folder), "there is no tokenizer.json in ", folder,
        "; --tokenizer names a folder that has it, or bytes");
    result.tokenizer = Tokenizer::read(folder);
  }
  return result;
}

} // namespace fsdp::cli
