#include "cli/config/hf_config.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "cli/check.h"
#include "cli/config/json_fields.h"
#include "cli/files.h"
#include "cli/train/rotary.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

/// Fields that do not change what a model computes.
const std::set<std::string> kHarmless{
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path",
    "_sliding_window_pattern", // layer_types says it
    "architectures", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "finetuning_task",
    "gradient_checkpointing", // how to compute, not what
    "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "is_llama_config",
    "keys_to_ignore_at_inference", "label2id", "model_type", "name_or_path", "output_attentions",
    "output_hidden_states", "pad_token_id", "prefix",
    "pretraining_tp", // how to compute, not what
    "problem_type", "return_dict", "sep_token_id", "task_specific_params", "tf_legacy_loss",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    // How to generate text, in older files; newer ones have it in generation_config.json.
    "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
    "temperature", "top_k", "top_p", "typical_p"};

/// The base and scaling of the rotary positions. Transformers 5 has them in rope_parameters, and
/// earlier versions in rope_theta and rope_scaling.
void read_rotary(JsonFields& fields, const std::string& family, int64_t longest, ModelDims& dims) {
  const bool gemma3 = family == "gemma3_text"; // has others in blocks with a window
  dims.rotary_base = fields.get<double>("rope_theta", gemma3 ? 1e6 : 1e4);
  const auto old = fields.get<Json>("rope_scaling", {});
  auto parameters = fields.get<Json>("rope_parameters", {});
  if (gemma3) {
    dims.window_rotary_base = fields.get<double>("rope_local_base_freq", 1e4);
    if (!parameters.is_null()) {
      JsonFields both(parameters, fields.file() + ": rope_parameters");
      JsonFields sliding(
          both.require<Json>("sliding_attention"), both.file() + ": sliding_attention");
      sliding.expect<std::string>("rope_type", "default");
      dims.window_rotary_base = sliding.get<double>("rope_theta", dims.window_rotary_base);
      sliding.expect<double>("partial_rotary_factor", 1);
      sliding.check_all_read();
      parameters = both.require<Json>("full_attention");
      both.check_all_read();
    }
  }
  check_config(
      old.is_null() || parameters.is_null(), fields.file(),
      ": it has both \"rope_scaling\" and \"rope_parameters\"; remove one");
  if (old.is_null() && parameters.is_null()) {
    return;
  }
  JsonFields rope(
      old.is_null() ? parameters : old,
      fields.file() + (old.is_null() ? ": rope_parameters" : ": rope_scaling"));
  dims.rotary_base = rope.get<double>("rope_theta", dims.rotary_base);
  const auto old_name = rope.get<std::string>("type", "default");
  const auto type = rope.get<std::string>("rope_type", old_name);
  if (type == "linear") {
    dims.rotary_scaling = RotaryScaling{.factor = rope.require<double>("factor")}.str();
  } else if (type == "llama3") {
    dims.rotary_scaling =
        RotaryScaling{
            .factor = rope.require<double>("factor"),
            .low = rope.require<double>("low_freq_factor"),
            .high = rope.require<double>("high_freq_factor"),
            .original = rope.get<int64_t>("original_max_position_embeddings", longest)}
            .str();
  } else {
    check_config(
        type == "default", rope.file(), ": rope_type \"", type,
        "\" is not supported; default, linear and llama3 are");
  }
  rope.expect<double>("partial_rotary_factor", 1);
  rope.check_all_read(kHarmless);
}

/// Which blocks attend to the last `sliding_window` tokens only.
void read_window(JsonFields& fields, const std::string& family, ModelDims& dims) {
  const bool qwen = family == "qwen2" || family == "qwen3";
  if (qwen || family == "mistral") { // others have no such field, and refuse it
    const auto window = fields.get_or_zero<int64_t>("sliding_window", 4096); // null means none
    const auto from = qwen ? fields.get<int64_t>("max_window_layers", 28) : 0;
    if (!qwen || fields.get<bool>("use_sliding_window", false)) {
      dims.window = window;
      dims.window_from = from;
    }
  }
  const auto types = fields.get<std::vector<std::string>>("layer_types", {});
  if (family == "gemma2" || family == "gemma3_text") {
    dims.window = fields.get_or_zero<int64_t>("sliding_window", 4096);
    fields.expect<int64_t>("sliding_window_size", dims.window); // an old name beside it
    check_config(dims.window > 0, fields.file(), ": \"sliding_window\" must be above 0");
    dims.full_every = family == "gemma2" ? 2 : fields.get<int64_t>("sliding_window_pattern", 6);
    const auto full = std::find(types.begin(), types.end(), "full_attention");
    if (!types.empty()) { // decides it; whether it is regular is checked below
      dims.full_every = full == types.end() ? 0 : full - types.begin() + 1;
    }
  }
  check_config(
      types.empty() || std::ssize(types) == dims.layers, fields.file(), ": \"layer_types\" has ",
      types.size(), " entries for ", dims.layers, " layers");
  for (size_t i = 0; i < types.size(); ++i) {
    const bool slides = dims.window_of(static_cast<int64_t>(i)) > 0;
    const auto* const expected = slides ? "sliding_attention" : "full_attention";
    check_config(
        types[i] == expected, fields.file(), ": \"layer_types\" has \"", types[i], "\" for layer ",
        i, ", where only \"", expected, "\" is supported");
  }
}

/// A cap of scores; null means none.
double read_cap(JsonFields& fields, const std::string& key, double if_missing) {
  const auto cap = fields.get_or_zero<double>(key, if_missing);
  check_config(cap >= 0, fields.file(), ": \"", key, "\" must be above 0, or null");
  return cap;
}

/// The activation of the feed-forward part.
void check_activation(JsonFields& fields, const std::string& family) {
  constexpr const char* kGemma = "gelu_pytorch_tanh";
  if (family == "gemma") { // released with "gelu" in hidden_act, which does not mean it
    fields.expect<std::string>("hidden_activation", kGemma);
    if (fields.get<std::string>("hidden_act", kGemma) == "gelu") {
      return;
    }
  }
  const std::string only = family.starts_with("gemma") ? kGemma : "silu";
  fields.expect<std::string>("hidden_act", only);
  fields.expect<std::string>("hidden_activation", only);
}

/// `file`: for errors.
HfConfig parse_hf_config(Json json, const std::string& file) {
  JsonFields fields(std::move(json), file);
  const auto family = fields.require<std::string>("model_type");
  const std::set<std::string> known{"gemma",   "gemma2", "gemma3_text", "llama",
                                    "mistral", "qwen2",  "qwen3"};
  check_config(
      known.contains(family), file, ": models of the family \"", family,
      "\" are not supported; gemma, gemma2, gemma3_text, llama, mistral, qwen2 and qwen3 are");

  HfConfig config;
  auto& dims = config.dims;
  dims.gemma = family.starts_with("gemma");
  dims.vocab = fields.require<int64_t>("vocab_size");
  dims.dim = fields.require<int64_t>("hidden_size");
  dims.layers = fields.require<int64_t>("num_hidden_layers");
  dims.heads = fields.require<int64_t>("num_attention_heads");
  dims.kv_heads = fields.get<int64_t>("num_key_value_heads", dims.heads);
  dims.hidden = fields.require<int64_t>("intermediate_size");
  for (const auto& [key, size] : std::map<std::string, int64_t>{
           {"vocab_size", dims.vocab},
           {"hidden_size", dims.dim},
           {"num_hidden_layers", dims.layers},
           {"num_attention_heads", dims.heads},
           {"num_key_value_heads", dims.kv_heads},
           {"intermediate_size", dims.hidden}}) {
    constexpr int64_t kMost = 1 << 30;
    check_config(
        size > 0 && size <= kMost, file, ": \"", key, "\" is ", size, ", not a number from 1 to ",
        kMost);
  }
  dims.norm_eps = fields.get<double>("rms_norm_eps", 1e-6);
  dims.tied = fields.get<bool>("tie_word_embeddings", dims.gemma);
  // Where the field is missing, families have defaults of their own.
  check_config(fields.get<int64_t>("head_dim", 1) > 0, file, ": \"head_dim\" must be above 0");
  dims.head_size = fields.get<int64_t>("head_dim", family == "qwen3" ? 128 : dims.gemma ? 256 : 0);
  dims.qk_norm = family == "qwen3" || family == "gemma3_text";
  if (family == "gemma2" || family == "gemma3_text") {
    const bool caps = family == "gemma2";
    const auto attention_cap = read_cap(fields, "attn_logit_softcapping", 50);
    dims.attention_cap = caps ? attention_cap : 0; // Gemma 3 has the field, but does not use it
    dims.score_cap = read_cap(fields, "final_logit_softcapping", caps ? 30 : 0);
    dims.attention_size = fields.get<int64_t>("query_pre_attn_scalar", 256);
    dims.sandwich_norms = true;
  }
  // Mistral and Qwen2 do not read the field.
  const bool attention_bias =
      fields.get<bool>("attention_bias", false) && family != "mistral" && family != "qwen2";
  dims.qkv_bias = attention_bias || family == "qwen2";
  dims.o_bias = attention_bias;
  dims.mlp_bias = fields.get<bool>("mlp_bias", false);
  config.longest = fields.get<int64_t>("max_position_embeddings", 0);
  read_rotary(fields, family, config.longest, dims);
  read_window(fields, family, dims);
  check_activation(fields, family);
  fields.expect<bool>("use_mrope", false);
  fields.expect<bool>("add_cross_attention", false);
  fields.expect<bool>("tie_encoder_decoder", false);
  fields.expect<Json>("pruned_heads", Json::object());
  fields.expect<bool>("rope_interleaved", false);
  fields.expect<double>("attention_dropout", 0);
  fields.expect<bool>("use_bidirectional_attention", false);
  fields.expect<double>("partial_rotary_factor", 1);
  fields.check_all_read(kHarmless);
  return config;
}

/// The family whose models come closest.
std::string family_of(const ModelDims& dims) {
  if (dims.gemma) {
    return !dims.sandwich_norms ? "gemma" : dims.qk_norm ? "gemma3_text" : "gemma2";
  }
  const bool qwen2 = dims.qkv_bias && !dims.o_bias;
  return dims.qk_norm ? "qwen3" : qwen2 ? "qwen2" : dims.window > 0 ? "mistral" : "llama";
}

/// The config.json of a family. It may lack something that the family does not have.
Json json_of_family(const ModelDims& dims, int64_t longest) {
  const auto family = family_of(dims);
  const bool gemma2 = family == "gemma2";
  const bool gemma3 = family == "gemma3_text";
  const auto scaling = RotaryScaling::parse(dims.rotary_scaling);
  auto name = gemma3 ? std::string("gemma3") : family;
  name[0] = static_cast<char>(std::toupper(name[0]));
  Json json{
      {"architectures", {name + "ForCausalLM"}},
      {"model_type", family},
      // Families have defaults for these, which are wrong for another tokenizer.
      {"bos_token_id", nullptr},
      {"eos_token_id", nullptr},
      {"pad_token_id", nullptr},
      {"vocab_size", dims.vocab},
      {"hidden_size", dims.dim},
      {"intermediate_size", dims.hidden},
      {"num_hidden_layers", dims.layers},
      {"num_attention_heads", dims.heads},
      {"num_key_value_heads", dims.kv_heads},
      {"head_dim", dims.head_dim()},
      {gemma2 || gemma3 ? "hidden_activation" : "hidden_act",
       dims.gemma ? "gelu_pytorch_tanh" : "silu"},
      {"max_position_embeddings", longest},
      {"rms_norm_eps", dims.norm_eps},
      {"tie_word_embeddings", dims.tied},
      {"attention_bias", dims.o_bias},
      {"rope_theta", dims.rotary_base}};
  if (family == "llama") {
    json["mlp_bias"] = dims.mlp_bias;
  }
  if (gemma2 || gemma3) {
    const auto cap = [](double value) { return value > 0 ? Json(value) : Json(nullptr); };
    json["query_pre_attn_scalar"] = dims.attention_size > 0 ? dims.attention_size : dims.head_dim();
    json["attn_logit_softcapping"] = cap(dims.attention_cap);
    json["final_logit_softcapping"] = cap(dims.score_cap);
    json["sliding_window"] = 4096; // says nothing if no layer has it
    for (int64_t i = 0; i < dims.layers; ++i) {
      json["layer_types"].push_back(dims.window_of(i) > 0 ? "sliding_attention" : "full_attention");
    }
    if (gemma3) {
      json["rope_local_base_freq"] =
          dims.window_rotary_base > 0 ? dims.window_rotary_base : dims.rotary_base;
    }
  }
  if (dims.window > 0) {
    json["sliding_window"] = dims.window;
    if (family == "qwen2" || family == "qwen3") {
      json["use_sliding_window"] = true;
      json["max_window_layers"] = dims.window_from;
    }
  }
  if (scaling) {
    json["rope_scaling"] = Json{
        {"rope_type", scaling->original > 0 ? "llama3" : "linear"}, {"factor", scaling->factor}};
    if (scaling->original > 0) {
      json["rope_scaling"]["low_freq_factor"] = scaling->low;
      json["rope_scaling"]["high_freq_factor"] = scaling->high;
      json["rope_scaling"]["original_max_position_embeddings"] = scaling->original;
    }
  }
  return json;
}

/// Whether two models compute the same.
bool is_same_model(const ModelDims& one, const ModelDims& other) {
  const auto sizes = [](const ModelDims& dims) {
    return std::make_tuple(
        dims.vocab, dims.dim, dims.layers, dims.heads, dims.kv_heads, dims.hidden, dims.head_dim());
  };
  const auto kinds = [](const ModelDims& dims) {
    return std::make_tuple(
        dims.tied, dims.qkv_bias, dims.o_bias, dims.mlp_bias, dims.qk_norm, dims.gemma,
        dims.sandwich_norms);
  };
  const auto numbers = [](const ModelDims& dims) {
    const auto scaling = RotaryScaling::parse(dims.rotary_scaling);
    bool slides = false;
    for (int64_t i = 0; i < dims.layers; ++i) {
      slides = slides || dims.window_of(i) > 0;
    }
    const bool has_own = slides && dims.window_rotary_base > 0;
    return std::make_tuple(
        dims.norm_eps, dims.attention_size > 0 ? dims.attention_size : dims.head_dim(),
        dims.attention_cap, dims.score_cap, dims.rotary_base, scaling ? scaling->str() : "none",
        has_own ? dims.window_rotary_base : dims.rotary_base,
        scaling && slides && !has_own); // the positions of a window's blocks are stretched
  };
  bool same_windows = true;
  for (int64_t i = 0; i < one.layers; ++i) {
    same_windows = same_windows && one.window_of(i) == other.window_of(i);
  }
  return sizes(one) == sizes(other) && kinds(one) == kinds(other) &&
         numbers(one) == numbers(other) && same_windows;
}

} // namespace

HfConfig read_hf_config(const std::string& folder) {
  const auto file = folder + "/config.json";
  check_config(is_folder(folder), "--from: there is no folder ", folder);
  check_config(
      is_file(file), "--from: ", folder,
      " has no config.json; it must be a folder of Hugging Face");
  return parse_hf_config(JsonFields::parse(file), file);
}

nlohmann::ordered_json hf_config_json(const ModelDims& dims, int64_t longest) {
  auto json = json_of_family(dims, longest);
  bool fits = false;
  try {
    fits = is_same_model(parse_hf_config(json, "config.json").dims, dims);
  } catch (const ConfigError&) { // windows that no family has
  }
  check_config(
      fits,
      "no family of models of Hugging Face has all of these options: --qkv-bias, --o-bias, "
      "--mlp-bias, --qk-norm, --window, --full-every, --window-rotary-base, --gemma, "
      "--sandwich-norms, --attention-size, --attention-cap, --score-cap");
  return json;
}

} // namespace fsdp::cli
