// Models of Hugging Face folders, next to what transformers computes with them.
#include "cli/hf_models.h"

#include <fsdp/distributed.h>
#include <fsdp/launch.h>
#include <fsdp/optim.h>

#include <cmath>
#include <fstream>

#include "cli/files.h"
#include "cli/generate/decoder.h"
#include "cli/generate/language_model.h"
#include "cli/tool.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;
using test::message_of;
using test::run;
using torch::Tensor;
using Json = nlohmann::ordered_json;

TEST(HfModel, LogitsAndAStepAreThoseOfTransformers) {
  SKIP_WITHOUT_TRANSFORMERS();
  for (const auto& name : models().names) {
    for (const auto& shape : kMeshes) {
      run_ranks(static_cast<int>(shape.ranks()), [&](int) {
        SCOPED_TRACE(name + " on " + shape.str());
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
    run_ranks(2, [&](int) {
      SCOPED_TRACE(name);
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
    run_ranks(1, [&](int) {
      SCOPED_TRACE(name);
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

/// What `fsdp eval` says of a model's loss on tokens of 16 bits.
Json evaluated(
    const std::string& model, const torch::Tensor& tokens, const std::vector<std::string>& more) {
  const auto file = test::temporary_folder() + "/t.bin";
  const auto narrow = tokens.to(torch::kInt16).contiguous();
  std::ofstream(file, std::ios::binary)
      .write(static_cast<const char*>(narrow.data_ptr()), 2 * narrow.numel());
  std::vector<std::string> words{"eval",   "--checkpoint", models().folder + "/" + model,
                                 "--data", file,           "--tokenizer",
                                 "bytes",  "--json"};
  words.insert(words.end(), more.begin(), more.end());
  const auto ended = run(words);
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  return Json::parse(ended.output);
}

TEST(HfModel, EvalIsThatOfTransformers) {
  SKIP_WITHOUT_TRANSFORMERS();
  const std::vector<std::vector<std::string>> meshes{
      {}, {"--ranks", "3", "--batch", "1"}, {"--mesh", "dp=2,shard=1,tp=2"}};
  size_t number = 0;
  for (const auto& name : models().names) {
    SCOPED_TRACE(name);
    auto words = meshes[number++ % meshes.size()];
    words.insert(words.end(), {"--context", "20"});
    const auto json = evaluated(name, rows_of(name), words);
    const auto theirs = expected(name, "mean_loss", {}, torch::kDouble).item<double>();
    EXPECT_NEAR(json.at("loss").get<double>(), theirs, 1e-5);
    EXPECT_NEAR(json.at("perplexity").get<double>(), std::exp(theirs), 1e-3 * std::exp(theirs));
    EXPECT_EQ(json.at("tokens").get<int64_t>(), 4 * 33 - 1);
  }
}

/// Positions are relative. So a document is as likely in a row of its own as beside another one.
TEST(HfModel, EvalDoesNotCrossDocuments) {
  SKIP_WITHOUT_TRANSFORMERS();
  constexpr int64_t kLength = 8; // of a document, with the token 5 at its end
  auto tokens = torch::arange(16 * kLength).square().remainder(53).add(6).view({16, kLength});
  tokens.select(1, kLength - 1).fill_(5);
  const auto loss_of = [&](int64_t context, std::vector<std::string> more) {
    more.insert(more.end(), {"--context", std::to_string(context)});
    return evaluated("llama", tokens, more).at("loss").get<double>();
  };
  const auto alone = loss_of(kLength, {"--document-end", "5"});
  EXPECT_NEAR(loss_of(4 * kLength, {"--document-end", "5"}), alone, 1e-5);
  EXPECT_GT(std::abs(loss_of(4 * kLength, {}) - loss_of(kLength, {})), 1e-4);
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

// ------------------------------------------------------------ Weights

TEST(HfModel, WeightsThatDoNotFitAreNamed) {
  SKIP_WITHOUT_TRANSFORMERS();
  const auto message = [](const std::string& name, auto change) {
    auto dims = config_of(name, {}).model;
    change(dims);
    return message_of<ConfigError>([&] { check_weights_fit(dims, models().folder + "/" + name); });
  };
  EXPECT_TRUE(contains(
      message("qwen2", [](ModelDims& dims) { dims.qkv_bias = false; }),
      "has no 'model.layers.0.self_attn.k_proj.bias', which model"));
  EXPECT_TRUE(
      contains(message("llama", [](ModelDims& dims) { dims.qk_norm = true; }), "k_norm.weight"));
  EXPECT_TRUE(
      contains(message("llama", [](ModelDims& dims) { dims.hidden = 128; }), "_proj.weight"));
  EXPECT_TRUE(
      contains(message("llama", [](ModelDims& dims) { dims.layers = 2; }), "'model.layers.2."));
}

TEST(HfModel, AnOutputLayerThatIsSharedMustBeTheEmbedding) {
  SKIP_WITHOUT_TRANSFORMERS();
  const auto dims = config_of("llama-tied", {}).model;
  run_ranks(1, [&](int) {
    const auto config = config_of("llama-tied", {});
    auto model = loaded(config, TrainMesh(*config.mesh, c10::kCPU), "llama-tied");
    const auto embedding = as_dtensor(model->embed_tokens->weight).full_tensor();
    for (const bool same : {true, false}) {
      const auto folder = test::temporary_folder() + "/tied";
      std::filesystem::copy(models().folder + "/llama-tied", folder);
      std::filesystem::remove(folder + "/model.safetensors.index.json");
      StateDict head;
      head.insert("lm_head.weight", embedding + (same ? 0 : 1e-3));
      save_hf(head, folder + ".head");
      std::filesystem::rename(folder + ".head/model.safetensors", folder + "/head.safetensors");
      if (same) {
        check_weights_fit(dims, folder);
      } else {
        EXPECT_TRUE(contains(
            message_of<ConfigError>([&] { check_weights_fit(dims, folder); }),
            "lm_head.weight is not the weight of the embedding"));
      }
    }
  });
}

TEST(HfModel, DamagedWeightsAreRefused) {
  SKIP_WITHOUT_TRANSFORMERS();
  const auto original = models().folder + "/llama-tied";
  run_ranks(1, [&](int) {
    const auto config = config_of("llama-tied", {});
    StateDict state;
    for (const auto& tensor : inspect_checkpoint(original).tensors) {
      state.insert(tensor.name, torch::empty(tensor.shape));
    }
    load(state, original);
    const auto folder_with = [&](const torch::Tensor& norm) {
      const auto folder = test::temporary_folder() + "/damaged";
      state.set("model.norm.weight", norm);
      save_hf(state, folder);
      return folder;
    };
    const auto norm = std::get<torch::Tensor>(state.at("model.norm.weight")).clone();
    auto not_finite = norm.clone();
    not_finite[1] = std::nan("");
    auto model = loaded(config, TrainMesh(*config.mesh, c10::kCPU), "llama-tied");
    EXPECT_TRUE(contains(
        message_of<ConfigError>([&] { load_pretrained(model, folder_with(not_finite)); }),
        "'model.norm.weight' has a value that is not finite"));
    EXPECT_TRUE(contains(
        message_of<ConfigError>(
            [&] { check_weights_fit(config.model, folder_with(norm.to(torch::kChar))); }),
        "'model.norm.weight' is stored as I8 in model.safetensors"));
  });
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

} // namespace
} // namespace fsdp::cli
