// Models of Hugging Face folders, next to what transformers computes with them.
#include <fsdp/checkpoint.h>
#include <fsdp/distributed.h>
#include <fsdp/error.h>
#include <fsdp/launch.h>
#include <fsdp/optim.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>

#include "cli/config/hf_config.h"
#include "cli/files.h"
#include "cli/generate/decoder.h"
#include "cli/generate/language_model.h"
#include "cli/text/tokenizer.h"
#include "cli/tiny_run.h"
#include "cli/train/pretrained.h"
#include "cli/train/rotary.h"
#include "cli/train/trainer.h"
#include "support/processes.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;
using test::message_of;
using test::run;
using torch::Tensor;
using Json = nlohmann::ordered_json;

/// The folder that hf_models.py has filled, and the names of its models. Empty without
/// transformers.
struct Models {
  std::string folder;
  std::vector<std::string> names;
};

const Models& models() {
  static const Models made = [] {
    Models result;
    const std::string python = FSDP_TEST_PYTHON;
    if (python.empty() ||
        test::run_commands({{{python, "-c", "import transformers"}, {}}})[0].exit_code != 0) {
      return result;
    }
    result.folder = test::temporary_folder();
    const auto ended =
        test::run_commands({{{python, FSDP_TEST_DIR "/cli/hf_models.py", result.folder}, {}}})[0];
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    for (const auto& entry : std::filesystem::directory_iterator(result.folder)) {
      if (entry.path().extension() == ".safetensors") {
        result.names.push_back(entry.path().stem());
      }
    }
    EXPECT_GE(result.names.size(), 13u) << ended.output;
    return result;
  }();
  return made;
}

/// Says why a folder's tokenizer cannot be read. Empty if it can.
std::string no_tokenizer() {
  try {
    Tokenizer::read(models().folder + "/qwen3");
    return "";
  } catch (const ConfigError& error) {
    return error.what_without_backtrace();
  }
}

#define SKIP_WITHOUT_TOKENIZER()             \
  SKIP_WITHOUT_TRANSFORMERS();               \
  if (contains(no_tokenizer(), "without")) { \
    GTEST_SKIP() << no_tokenizer();          \
  }

#define SKIP_WITHOUT_TRANSFORMERS()                  \
  if (models().names.empty()) {                      \
    GTEST_SKIP() << "transformers is not installed"; \
  }

/// What transformers found.
Tensor expected(
    const std::string& name,
    const std::string& key,
    at::IntArrayRef sizes,
    at::ScalarType dtype = torch::kFloat) {
  StateDict state;
  state.insert(key, torch::empty(sizes, dtype));
  load(state, models().folder + "/" + name + ".safetensors");
  return std::get<Tensor>(state.at(key));
}

Tensor rows_of(const std::string& name) {
  return expected(name, "rows", {4, 33}, torch::kLong);
}

TrainConfig config_of(const std::string& name, const MeshShape& mesh) {
  TrainConfig config;
  config.model = read_hf_config(models().folder + "/" + name).dims;
  config.mesh = mesh;
  return config;
}

Transformer loaded(const TrainConfig& config, const TrainMesh& mesh, const std::string& name) {
  auto model = build_sharded(config, mesh);
  to_empty(model, torch::kCPU);
  load_pretrained(model, models().folder + "/" + name);
  return model;
}

Tensor max_difference(const Tensor& a, const Tensor& b) {
  return (a - b).abs().max();
}

const std::vector<MeshShape> kMeshes{
    {}, {.shard = 3}, {.replicate = 2, .shard = 2}, {.shard = 2, .tensor = 2}};

TEST(HfModel, LogitsAndAStepAreThoseOfTransformers) {
  SKIP_WITHOUT_TRANSFORMERS();
  for (const auto& name : models().names) {
    for (const auto& shape : kMeshes) {
      SCOPED_TRACE(name + " on " + shape.str());
      run_ranks(static_cast<int>(shape.ranks()), [&](int) {
        const auto config = config_of(name, shape);
        const TrainMesh mesh(shape, c10::kCPU);
        auto model = loaded(config, mesh, name);
        const auto rows = rows_of(name);
        const auto logits = model(rows.narrow(1, 0, 32));
        const auto vocab = config.model.vocab;
        auto theirs = expected(name, "logits", {4, 32, vocab});
        if (mesh.tensor) {
          theirs = theirs.chunk(2, -1)[mesh.tensor->get_local_rank()];
        }
        EXPECT_LT(max_difference(logits, theirs).item<float>(), 1e-5);

        const auto targets = rows.narrow(1, 1, 32).flatten();
        const auto scores = logits.flatten(0, 1);
        const auto loss = mesh.tensor ? parallel_cross_entropy(scores, targets, *mesh.tensor)
                                      : torch::nn::functional::cross_entropy(scores, targets);
        EXPECT_NEAR(loss.item<float>(), expected(name, "loss", {}).item<float>(), 1e-5);
        loss.backward();
        optim::AdamW optimizer(
            model->parameters(), torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
        for (const auto& item : model->named_parameters()) {
          const auto grad = as_dtensor_grad(item.value()).full_tensor();
          const auto reference = expected(name, "grad." + item.key(), grad.sizes());
          EXPECT_LT(max_difference(grad, reference).item<float>(), 2e-6) << item.key();
        }
        optimizer.step();
        for (const auto& item : model->named_parameters()) {
          const auto after = as_dtensor(item.value()).full_tensor();
          const auto reference = expected(name, "after." + item.key(), after.sizes());
          // AdamW's first step has the size of the learning rate wherever a gradient is not 0.
          const auto grad = expected(name, "grad." + item.key(), after.sizes());
          const auto difference = (after - reference).abs().where(grad.abs() > 1e-5, 0);
          EXPECT_LT(difference.max().item<float>(), 1e-5) << item.key();
        }
      });
    }
  }
}

TEST(HfModel, InBf16TheLogitsAreAsGoodAsThoseOfTransformers) {
  SKIP_WITHOUT_TRANSFORMERS();
  for (const auto& name : models().names) {
    SCOPED_TRACE(name);
    run_ranks(2, [&](int) {
      auto config = config_of(name, {.shard = 2});
      config.param_dtype = "bf16";
      auto model = loaded(config, TrainMesh(*config.mesh, c10::kCPU), name);
      const torch::NoGradGuard no_grad;
      const auto logits = model(rows_of(name).narrow(1, 0, 32)).to(torch::kFloat);
      const auto exact = expected(name, "logits", logits.sizes());
      const auto theirs = expected(name, "bf16", logits.sizes());
      const auto error = [&](const Tensor& of) { return (of - exact).square().mean().sqrt(); };
      EXPECT_LT(error(logits).item<float>(), 1.5 * error(theirs).item<float>());
      EXPECT_GT(error(logits).item<float>(), 0);
    });
  }
}

TEST(HfModel, GeneratesWhatTransformersGenerates) {
  SKIP_WITHOUT_TRANSFORMERS();
  for (const auto& name : models().names) {
    SCOPED_TRACE(name);
    run_ranks(1, [&](int) {
      auto model =
          load_whole(find_language_model(models().folder + "/" + name, "bytes"), torch::kFloat);
      Decoder decoder(model, 49);
      const auto all = torch::cat(
          {rows_of(name)[0].narrow(0, 0, 9), expected(name, "generated", {40}, torch::kLong)});
      const std::vector<int64_t> tokens(all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + 49);
      auto scores = decoder.scores_behind({tokens.begin(), tokens.begin() + 9});
      const torch::NoGradGuard no_grad;
      const auto whole = model(all.unsqueeze(0))[0];
      for (int64_t i = 9; i < 49; ++i) {
        EXPECT_EQ(scores.argmax().item<int64_t>(), tokens[i]) << "token " << i;
        EXPECT_LT(max_difference(scores, whole[i - 1]).item<float>(), 1e-5);
        scores = decoder.scores_behind({tokens[i]});
      }
      EXPECT_EQ(decoder.length(), 49);
      EXPECT_TRUE(contains(
          message_of<c10::Error>([&] { decoder.scores_behind({1}); }), "room for 49 tokens"));
    });
  }
}

TEST(HfModel, TheToolContinuesAText) {
  SKIP_WITHOUT_TOKENIZER();
  for (const std::string name : {"qwen3", "qwen3-stops"}) {
    SCOPED_TRACE(name);
    const auto folder = models().folder + "/" + name;
    const auto json = Json::parse(read_file(folder + "/continued.json").value());
    const auto prompt = json.at("prompt").get<std::string>();
    const auto tokenizer = Tokenizer::read(folder);
    auto text = prompt;
    std::string last; // of the tokens that can be printed
    for (const auto& token : json.at("tokens")) {
      text += tokenizer.bytes_of(token);
      last = tokenizer.bytes_of(token);
    }
    const auto generated = [&](std::vector<std::string> more) {
      std::vector<std::string> words{"generate", "--checkpoint", folder, "--prompt",
                                     prompt,     "--tokens",     "40",   "--raw"};
      words.insert(words.end(), more.begin(), more.end());
      const auto ended = run(words);
      EXPECT_EQ(ended.exit_code, 0) << ended.output;
      return ended.output;
    };
    EXPECT_EQ(generated({"--temperature", "0"}), text + "\n");
    EXPECT_EQ(generated({"--temperature", "0.5", "--top-p", "1e-9"}), text + "\n");
    // Stops before the first place where the text has it.
    const auto at = text.find(last, prompt.size());
    EXPECT_EQ(generated({"--temperature", "0", "--stop", last}), text.substr(0, at) + "\n");
    EXPECT_EQ(generated({"--seed", "7"}), generated({"--seed", "7"}));
    EXPECT_NE(generated({"--seed", "7"}), generated({"--seed", "8"}));
  }
}

TEST(HfModel, EvalIsThatOfTransformers) {
  SKIP_WITHOUT_TRANSFORMERS();
  const auto evaluated = [](std::vector<std::string> words) {
    words.insert(words.begin(), "eval");
    words.emplace_back("--json");
    const auto ended = run(words);
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    return Json::parse(ended.output);
  };
  const std::vector<std::vector<std::string>> meshes{
      {}, {"--ranks", "3", "--batch", "1"}, {"--mesh", "dp=2,shard=1,tp=2"}};
  size_t number = 0;
  for (const auto& name : models().names) {
    SCOPED_TRACE(name);
    const auto tokens = test::temporary_folder() + "/t.bin";
    const auto rows = rows_of(name).to(torch::kInt16).contiguous();
    std::ofstream(tokens, std::ios::binary)
        .write(static_cast<const char*>(rows.data_ptr()), 2 * rows.numel());
    std::vector<std::string> words{"--checkpoint", models().folder + "/" + name,
                                   "--data",       tokens,
                                   "--context",    "20",
                                   "--tokenizer",  "bytes"};
    const auto& mesh = meshes[number++ % meshes.size()];
    words.insert(words.end(), mesh.begin(), mesh.end());
    const auto json = evaluated(words);
    const auto theirs = expected(name, "mean_loss", {}, torch::kDouble).item<double>();
    EXPECT_NEAR(json.at("loss").get<double>(), theirs, 1e-5);
    EXPECT_NEAR(json.at("perplexity").get<double>(), std::exp(theirs), 1e-3 * std::exp(theirs));
    EXPECT_EQ(json.at("tokens").get<int64_t>(), 4 * 33 - 1);
  }
}

TEST(HfModel, BitsPerByteCountTheBytesOfTheText) {
  SKIP_WITHOUT_TOKENIZER();
  const auto folder = models().folder + "/qwen3";
  const auto tokenizer = Tokenizer::read(folder);
  const std::string text = "import torch\n# Größe\n";
  const auto path = test::temporary_folder() + "/a.txt";
  std::ofstream(path) << text;
  const auto ended = run({"eval", "--checkpoint", folder, "--data", path, "--json"});
  ASSERT_EQ(ended.exit_code, 0) << ended.output;
  const auto json = Json::parse(ended.output);
  const auto tokens = tokenizer.encode(text);
  // The first token is not told. The end of the document is, but it is no byte of the text.
  EXPECT_EQ(json.at("tokens").get<size_t>(), tokens.size());
  const auto bytes = text.size() - tokenizer.bytes_of(tokens[0]).size();
  EXPECT_EQ(json.at("bytes").get<size_t>(), bytes);
  EXPECT_NEAR(
      json.at("bits_per_byte").get<double>(),
      json.at("loss").get<double>() * static_cast<double>(tokens.size()) / std::log(2.0) /
          static_cast<double>(bytes),
      1e-6);
}

// ------------------------------------------------------------ config.json

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
  refused(with("model_type", "gemma2"), "\"gemma2\" are not supported");
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

// ------------------------------------------------------------ Weights

TEST(HfModel, WeightsThatDoNotFitAreNamed) {
  SKIP_WITHOUT_TRANSFORMERS();
  const auto message = [](const std::string& name, auto change) {
    std::string found;
    run_ranks(1, [&](int) {
      auto config = config_of(name, {});
      change(config.model);
      auto model = build_sharded(config, TrainMesh({}, c10::kCPU));
      to_empty(model, torch::kCPU);
      found = message_of<c10::Error>([&] { load_pretrained(model, models().folder + "/" + name); });
    });
    return found;
  };
  EXPECT_TRUE(contains(
      message("qwen2", [](ModelDims& dims) { dims.qkv_bias = false; }),
      "has no 'model.layers.0.self_attn.k_proj.bias', which model"));
  EXPECT_TRUE(
      contains(message("llama", [](ModelDims& dims) { dims.qk_norm = true; }), "q_norm.weight"));
  EXPECT_TRUE(
      contains(message("llama", [](ModelDims& dims) { dims.hidden = 128; }), "_proj.weight"));
  EXPECT_TRUE(
      contains(message("llama", [](ModelDims& dims) { dims.layers = 2; }), "'model.layers.2."));
}

TEST(HfModel, AnOutputLayerThatIsSharedMustBeTheEmbedding) {
  SKIP_WITHOUT_TRANSFORMERS();
  for (const bool same : {true, false}) {
    const auto folder = test::temporary_folder() + "/tied";
    std::filesystem::copy(models().folder + "/llama-tied", folder);
    run_ranks(2, [&](int rank) {
      const auto config = config_of("llama-tied", {.shard = 2});
      auto model = loaded(config, TrainMesh(*config.mesh, c10::kCPU), "llama-tied");
      const auto embedding = as_dtensor(model->embed_tokens->weight).full_tensor();
      StateDict head;
      head.insert("lm_head.weight", embedding + (same ? 0 : 1e-3));
      save_hf(head, folder + ".head");
      if (rank == 0) {
        std::filesystem::rename(folder + ".head/model.safetensors", folder + "/head.safetensors");
        std::filesystem::remove(folder + "/model.safetensors.index.json");
      }
      default_group().barrier();
      const auto load_again = [&] { load_pretrained(model, folder); };
      if (same) {
        load_again();
        EXPECT_SAME(as_dtensor(model->embed_tokens->weight).full_tensor(), embedding);
      } else {
        EXPECT_TRUE(contains(
            message_of<ConfigError>(load_again), "lm_head.weight is not the weight of the"));
      }
    });
  }
}

TEST(HfModel, FoldersWithoutTheirWeightsAreRefused) {
  SKIP_WITHOUT_TRANSFORMERS();
  const auto refused = [](auto change, const std::string& part) {
    const auto folder = test::temporary_folder() + "/model";
    std::filesystem::copy(models().folder + "/llama", folder); // of several files
    change(folder);
    const auto message = message_of<ConfigError>([&] { check_weight_files(folder); });
    EXPECT_TRUE(contains(message, part)) << message;
  };
  refused(
      [](const std::string& folder) {
        std::filesystem::remove(folder + "/model-00002-of-00010.safetensors");
      },
      "there is no model-00002-of-00010.safetensors");
  refused(
      [](const std::string& folder) { write_file(folder + "/model.safetensors", "x"); },
      "it has both model.safetensors and");
  refused(
      [](const std::string& folder) {
        std::filesystem::remove(folder + "/model.safetensors.index.json");
        write_file(folder + "/pytorch_model.bin", "x");
      },
      "its weights are in pytorch_model.bin");
  const auto fingerprint = [](const std::string& name) {
    return weights_fingerprint(models().folder + "/" + name);
  };
  EXPECT_EQ(fingerprint("llama"), fingerprint("llama"));
  EXPECT_NE(fingerprint("llama3.1"), fingerprint("llama-linear"));
}

// ------------------------------------------------------------ The tool

/// Exports a run, lets transformers load the folder, and compares the logits.
void expect_export_is_read(const std::string& run_folder) {
  const auto out = test::temporary_folder() + "/exported";
  const auto exported = run({"export", run_folder, out});
  ASSERT_EQ(exported.exit_code, 0) << exported.output;
  const auto found = test::temporary_folder() + "/found.safetensors";
  const auto ended = test::run_commands(
      {{{FSDP_TEST_PYTHON, FSDP_TEST_DIR "/cli/hf_models.py", out, found}, {}}})[0];
  ASSERT_EQ(ended.exit_code, 0) << ended.output;
  run_ranks(1, [&](int) {
    TrainConfig config;
    config.model = read_hf_config(out).dims;
    auto model = build_sharded(config, TrainMesh({}, c10::kCPU));
    to_empty(model, torch::kCPU);
    load_pretrained(model, out);
    StateDict state;
    state.insert("rows", torch::empty({4, 33}, torch::kLong));
    state.insert("logits", torch::empty({4, 32, config.model.vocab}));
    load(state, found);
    const torch::NoGradGuard no_grad;
    const auto logits = model(std::get<Tensor>(state.at("rows")).narrow(1, 0, 32));
    EXPECT_LT(max_difference(logits, std::get<Tensor>(state.at("logits"))).item<float>(), 1e-5);
    // They are the weights of the run.
    StateDict of_run;
    of_run.insert_all(get_model_state_dict(model), "model.");
    std::map<std::string, Tensor> weights;
    for (const auto& item : model->named_parameters()) {
      weights[item.key()] = as_dtensor(item.value()).full_tensor().clone();
    }
    load(of_run, run_folder + "/checkpoints/latest");
    for (const auto& item : model->named_parameters()) {
      EXPECT_SAME(as_dtensor(item.value()).full_tensor(), weights.at(item.key()));
    }
  });
  const auto again = run({"export", run_folder, out});
  EXPECT_EQ(again.exit_code, 2) << again.output;
  EXPECT_TRUE(contains(again.output, "exists already; choose another name"));
}

TEST(HfModel, ARunFromScratchIsExported) {
  SKIP_WITHOUT_TRANSFORMERS();
  const auto folder = test::temporary_folder() + "/run";
  for (const auto& [name, more] : std::map<std::string, std::vector<std::string>>{
           {"llama", {}},
           {"mistral", {"--window", "9", "--tied", "true"}},
           {"qwen2", {"--qkv-bias", "true", "--rotary-scaling", "llama3:4,1,4,16"}},
           {"gemma", {"--gemma", "true", "--tied", "true", "--head-dim", "16"}}}) {
    SCOPED_TRACE(name);
    auto words = test::tiny_options(test::text_file(), {"--run", folder + name, "--steps", "3"});
    words.insert(words.end(), more.begin(), more.end());
    const auto trained = run(words);
    ASSERT_EQ(trained.exit_code, 0) << trained.output;
    expect_export_is_read(folder + name);
  }
}

TEST(HfModel, TextBecomesTokensOfTheFolder) {
  SKIP_WITHOUT_TOKENIZER();
  const auto from = models().folder + "/qwen3";
  const auto tokenizer = Tokenizer::read(from);
  const auto folder = test::temporary_folder();
  const std::string text = "def main(out):\n    # Größe\n    return 1\n";
  std::ofstream(folder + "/a.txt") << text;
  std::ofstream(folder + "/b.jsonl") << R"({"text": "import torch", "id": 1})"
                                        "\n\n"
                                     << R"({"id": 2, "text": "\u00e4 <|endoftext|>"})";
  std::vector<int64_t> tokens;
  for (const std::string& document :
       {text, std::string("import torch"), std::string("ä <|endoftext|>")}) {
    const auto more = tokenizer.encode(document);
    tokens.insert(tokens.end(), more.begin(), more.end());
    const auto end = tokenizer.find("<|endoftext|>").value();
    if (tokens.back() != end) { // the last document has it already
      tokens.push_back(end);
    }
  }
  const auto tokenized = [&](const std::string& out, std::vector<std::string> more) {
    std::vector<std::string> words{"tokenize", "--tokenizer", from, "--out", folder + "/" + out};
    words.insert(words.end(), more.begin(), more.end());
    return run(words);
  };
  for (const std::string out : {"t.bin", "t.npy"}) {
    const auto ended = tokenized(out, {folder + "/a.txt", folder + "/b.jsonl"});
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    EXPECT_TRUE(contains(ended.output, "2 files, 3 documents")) << ended.output;
    const auto source = open_token_files({folder + "/" + out}, TokenType::uint16, 300);
    std::vector<int64_t> found(static_cast<size_t>(source->size()));
    source->read(0, source->size(), found.data());
    EXPECT_EQ(found, tokens);
  }

  const auto refused = [&](const std::string& out, const std::vector<std::string>& more,
                           const std::string& part) {
    const auto ended = tokenized(out, more);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(contains(ended.output, part)) << ended.output;
  };
  const auto a = folder + "/a.txt";
  refused("t.bin", {a}, "t.bin exists already");
  refused("t.txt", {a}, "must end in .bin or .npy");
  refused("u.bin", {folder + "/none.txt"}, "none.txt cannot be read");
  refused("u.bin", {a, "--end", "<none>"}, "--end <none>: the tokenizer has no such token");
  std::ofstream(folder + "/c.txt") << text << "\xff";
  refused(
      "u.bin", {folder + "/c.txt"}, "c.txt is not UTF-8 at byte " + std::to_string(text.size()));
  std::ofstream(folder + "/c.jsonl") << "{\"text\": \"a\"}\n{\"texts\": \"a\"}\n";
  refused("u.bin", {folder + "/c.jsonl"}, "c.jsonl line 2 is not an object with the text \"text\"");
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    EXPECT_FALSE(contains(entry.path().filename().string(), "u.bin")) << entry.path();
  }

  // Files of tokens need no tokenizer, so it may be of any kind. Empty files have no text.
  const auto other = folder + "/other";
  std::filesystem::copy(from, other);
  std::ofstream(other + "/tokenizer.json") << R"({"normalizer": {"type": "Lowercase"}})";
  std::filesystem::create_directory(folder + "/texts");
  std::ofstream(folder + "/texts/a.txt") << read_file(test::text_file()).value();
  std::ofstream(folder + "/texts/empty.txt");
  EXPECT_EQ(tokenized("long.npy", {folder + "/texts/a.txt"}).exit_code, 0);
  const auto planned = [&](const std::string& model, const std::string& data) {
    return run({"train", "--dry-run", "--from", model, "--data", folder + data, "--context", "8"});
  };
  EXPECT_EQ(planned(other, "/long.npy").exit_code, 0) << planned(other, "/long.npy").output;
  EXPECT_EQ(planned(from, "/texts").exit_code, 0) << planned(from, "/texts").output;
  EXPECT_TRUE(contains(planned(other, "/texts").output, "Lowercase"));

  // A model with other tokens cannot be trained on bytes.
  const auto on_bytes =
      run({"train", "--dry-run", "--from", models().folder + "/llama", "--data", a});
  EXPECT_EQ(on_bytes.exit_code, 2) << on_bytes.output;
  EXPECT_TRUE(contains(on_bytes.output, "llama has no tokenizer.json")) << on_bytes.output;
}

TEST(HfModel, TrainStartsFromAFolder) {
  SKIP_WITHOUT_TOKENIZER();
  const auto text = test::text_file();
  const auto run_folder = test::temporary_folder() + "/run";
  const std::vector<std::string> words{"train",   "--from",    models().folder + "/qwen3",
                                       "--data",  text,        "--ranks",
                                       "2",       "--context", "32",
                                       "--batch", "4",         "--steps",
                                       "3",       "--run",     run_folder};
  const auto trained = run(words);
  EXPECT_EQ(trained.exit_code, 0) << trained.output;
  EXPECT_TRUE(contains(trained.output, "tokens to train on")) << trained.output;
  auto resumed = run({"train", "--resume", run_folder, "--steps", "5"});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.output;

  expect_export_is_read(run_folder);

  const auto refused = [&](std::vector<std::string> more, const std::string& part) {
    std::vector<std::string> all{"train", "--dry-run", "--from", models().folder + "/qwen3"};
    all.insert(all.end(), more.begin(), more.end());
    const auto ended = run(all);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(contains(ended.output, part)) << ended.output;
  };
  refused({"--dim", "128"}, "--dim 128: the model of --from has --dim 64; leave it out");
  refused({"--context", "65"}, "--context 65: the model of --from takes 64 tokens at most");
}

} // namespace
} // namespace fsdp::cli
