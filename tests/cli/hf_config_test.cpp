// config.json of a Hugging Face folder, read and written.
#include "cli/config/hf_config.h"

#include "cli/config/presets.h"
#include "cli/files.h"
#include "cli/hf_models.h"
#include "cli/train/rotary.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;
using test::message_of;
using Json = nlohmann::ordered_json;

/// Writes a folder with a config.json of a Llama that `change` has changed.
template <class Change>
std::string folder_with(Change change) {
  Json json{{"model_type", "llama"},    {"vocab_size", 300},
            {"hidden_size", 64},        {"intermediate_size", 96},
            {"num_hidden_layers", 2},   {"num_attention_heads", 4},
            {"num_key_value_heads", 2}, {"max_position_embeddings", 64}};
  change(json);
  const auto folder = test::temporary_folder();
  write_file(folder + "/config.json", json.dump());
  return folder;
}

TEST(HfConfig, WhatIsNotSupportedIsNamed) {
  const auto refused = [](auto change, const std::string& part) {
    const auto folder = folder_with(change);
    const auto message = message_of<ConfigError>([&] { read_hf_config(folder); });
    EXPECT_TRUE(contains(message, part)) << message;
  };
  const auto with = [](const char* key, Json value) {
    return [=](Json& json) { json[key] = value; };
  };
  refused(with("model_type", "mamba"), "models of the family \"mamba\" are not supported");
  refused(with("model_type", "gemma3"), "\"gemma3\" are not supported"); // it also reads images
  refused(with("model_type", Json(nullptr)), "\"model_type\" is missing");
  refused(with("vocab_size", "many"), "\"vocab_size\" is \"many\", which has the wrong type");
  refused([](Json& json) { json.erase("hidden_size"); }, "\"hidden_size\" is missing");
  refused(with("hidden_act", "relu"), "\"hidden_act\" is \"relu\", which is not supported");
  refused(with("hidden_activation", "gelu"), "\"hidden_activation\" is \"gelu\", which is not");
  refused(with("num_hidden_layers", 2.9), "\"num_hidden_layers\" is 2.9, which has the wrong type");
  refused(with("head_dim", 0), "\"head_dim\" must be above 0");
  refused(with("sliding_window", 5), "\"sliding_window\": 5 is not known here");
  refused(with("layer_types", Json{"full_attention"}), "has 1 entries for 2 layers");
  refused(with("rope_scaling", "linear"), "rope_scaling: it does not hold an object");
  refused(
      [](Json& json) {
        json["rope_scaling"] = Json{{"type", "linear"}, {"factor", 2}};
        json["rope_parameters"] = Json{{"rope_theta", 1e4}};
      },
      "it has both \"rope_scaling\" and \"rope_parameters\"");
  refused(with("attention_dropout", 0.1), "\"attention_dropout\" is 0.1, which is not supported");
  refused(with("num_local_experts", 8), "\"num_local_experts\": 8 is not known here");
  refused(
      with("quantization_config", Json{{"bits", 4}}), "\"quantization_config\": {\"bits\":4} is");
  refused(
      with("rope_scaling", Json{{"rope_type", "yarn"}, {"factor", 4}}),
      "rope_type \"yarn\" is not supported");
  refused(with("rope_scaling", Json{{"type", "linear"}}), "rope_scaling: \"factor\" is missing");
  refused(
      with("rope_parameters", Json{{"rope_theta", 1e4}, {"partial_rotary_factor", 0.5}}),
      "\"partial_rotary_factor\" is 0.5, which is not supported");
  refused(
      with("layer_types", Json{"full_attention", "sliding_attention"}),
      "\"layer_types\" has \"sliding_attention\" for layer 1");
  const auto folder = test::temporary_folder();
  EXPECT_TRUE(
      contains(message_of<ConfigError>([&] { read_hf_config(folder); }), "has no config.json"));
  write_file(folder + "/config.json", "[1, 2");
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { read_hf_config(folder); }), "it is not JSON"));
}

TEST(HfConfig, MissingFieldsHaveTheDefaultsOfTheirFamily) {
  const auto dims = [](auto change) { return read_hf_config(folder_with(change)).dims; };
  EXPECT_EQ(dims([](Json& json) { json["model_type"] = "mistral"; }).window, 4096);
  const auto no_window = [](Json& json) {
    json["model_type"] = "mistral";
    json["sliding_window"] = nullptr;
  };
  EXPECT_EQ(dims(no_window).window, 0);
  EXPECT_EQ(dims([](Json& json) { json["model_type"] = "qwen2"; }).window, 0);
  const auto used = [](Json& json) {
    json["model_type"] = "qwen2";
    json["use_sliding_window"] = true;
    json["max_window_layers"] = 1;
    json["attention_bias"] = true; // Qwen2 does not read it
  };
  EXPECT_EQ(dims(used).window, 4096);
  EXPECT_EQ(dims(used).window_from, 1);
  EXPECT_FALSE(dims(used).o_bias);
  EXPECT_EQ(dims([](Json& json) { json["model_type"] = "qwen3"; }).head_dim(), 128);
  EXPECT_EQ(dims([](Json& json) { json["model_type"] = "gemma"; }).head_dim(), 256);
  EXPECT_TRUE(dims([](Json& json) { json["model_type"] = "gemma"; }).tied);
  EXPECT_EQ(dims([](Json&) {}).head_dim(), 16);
  const auto scaled = [](Json& json) {
    json["rope_scaling"] = Json{{"type", "linear"}, {"factor", 3.3333337}};
  };
  EXPECT_EQ(RotaryScaling::parse(dims(scaled).rotary_scaling)->factor, 3.3333337);
}

TEST(HfConfig, WhatIsWrittenIsReadAgain) {
  SKIP_WITHOUT_TRANSFORMERS();
  for (const auto& name : models().names) {
    SCOPED_TRACE(name);
    const auto read = read_hf_config(models().folder + "/" + name);
    const auto folder = test::temporary_folder();
    write_file(folder + "/config.json", hf_config_json(read.dims, read.longest).dump());
    const auto again = read_hf_config(folder);
    EXPECT_EQ(hf_config_json(again.dims, again.longest), hf_config_json(read.dims, read.longest));
    EXPECT_EQ(again.dims.head_dim(), read.dims.head_dim());
    EXPECT_EQ(again.dims.window_from, read.dims.window_from);
    EXPECT_EQ(again.dims.qkv_bias, read.dims.qkv_bias);
    EXPECT_EQ(again.dims.rotary_scaling, read.dims.rotary_scaling);
    EXPECT_EQ(again.longest, 64);
  }
}

TEST(HfConfig, ReleasedModelsAreRead) {
  struct Released {
    std::string name;
    int64_t layers, heads, kv_heads, head_dim;
    double rotary_base;
    std::vector<int64_t> windows; // of the first blocks
    bool tied;
  };
  for (const auto& [name, layers, heads, kv_heads, head_dim, rotary_base, windows, tied] :
       std::vector<Released>{
           {"Llama-3.2-1B", 16, 32, 8, 64, 5e5, {0, 0}, true},
           {"unsloth-Llama-3.2-1B", 16, 32, 8, 64, 5e5, {0, 0}, true},
           {"Qwen2.5-0.5B", 24, 14, 2, 64, 1e6, {0, 0}, true},
           {"Qwen3-0.6B", 28, 16, 8, 128, 1e6, {0, 0}, true},
           {"Mistral-7B-v0.3", 32, 32, 8, 128, 1e6, {0, 0}, false},
           {"Mistral-Nemo-Base-2407", 40, 32, 8, 128, 1e6, {0, 0}, false},
           {"gemma-2b", 18, 8, 1, 256, 1e4, {0, 0}, true},
           {"gemma-2-2b", 26, 8, 4, 256, 1e4, {4096, 0, 4096, 0}, true},
           {"gemma-3-1b-it", 26, 4, 1, 256, 1e6, {512, 512, 512, 512, 512, 0, 512}, true}}) {
    SCOPED_TRACE(name);
    auto json = Json::parse(read_file(FSDP_TEST_DIR "/cli/configs/" + name + ".json").value());
    json["do_sample"] = true; // as older programs save it
    json["add_cross_attention"] = false;
    json["pruned_heads"] = Json::object();
    json["torchscript"] = false;
    json["transformers.js_config"] = Json{{"dtype", "q4"}};
    const auto folder = test::temporary_folder();
    write_file(folder + "/config.json", json.dump());
    const auto dims = read_hf_config(folder).dims;
    EXPECT_EQ(dims.layers, layers);
    EXPECT_EQ(dims.heads, heads);
    EXPECT_EQ(dims.kv_heads, kv_heads);
    EXPECT_EQ(dims.head_dim(), head_dim);
    EXPECT_EQ(dims.rotary_base, rotary_base);
    EXPECT_EQ(dims.tied, tied);
    for (size_t i = 0; i < windows.size(); ++i) {
      EXPECT_EQ(dims.window_of(static_cast<int64_t>(i)), windows[i]) << "layer " << i;
    }
    // What is written describes the same model, and no tokens of another tokenizer.
    const auto written = hf_config_json(dims, 1024);
    for (const auto* token : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
      EXPECT_TRUE(written.at(token).is_null()) << token;
    }
  }
}

TEST(HfConfig, AModelThatNoFamilyHasIsNotWritten) {
  const auto refused = [](auto change) {
    ModelDims dims;
    change(dims);
    const auto message = message_of<ConfigError>([&] { hf_config_json(dims, 64); });
    EXPECT_TRUE(contains(message, "no family of models of Hugging Face")) << message;
  };
  refused([](ModelDims& dims) { dims.o_bias = true; });
  refused([](ModelDims& dims) { dims.qk_norm = dims.mlp_bias = true; });
  refused([](ModelDims& dims) { dims.attention_cap = 30; });
  refused([](ModelDims& dims) { dims.sandwich_norms = true; });
  refused([](ModelDims& dims) { dims.gemma = dims.qk_norm = true; });
  refused([](ModelDims& dims) {
    dims.window = 8;
    dims.window_from = 2;
  });
  refused([](ModelDims& dims) {
    dims.window = 8;
    dims.window_rotary_base = 100;
  });
}

} // namespace
} // namespace fsdp::cli
