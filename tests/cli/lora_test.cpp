// LoRA, next to what Python's peft computes.
#include "cli/train/lora.h"

#include <fsdp/checkpoint_tools.h>
#include <fsdp/distributed.h>
#include <fsdp/launch.h>
#include <fsdp/optim.h>

#include <fstream>
#include <map>

#include "cli/config/adapter_config.h"
#include "cli/files.h"
#include "cli/hf_models.h"
#include "cli/tool.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;
using test::message_of;
using test::run;
using torch::Tensor;
using Json = nlohmann::ordered_json;

/// The folder that lora_models.py has filled. Empty without peft.
const std::string& folder_of_models() {
  static const std::string made = [] {
    const std::string python = FSDP_TEST_PYTHON;
    if (python.empty() ||
        test::run_commands({{{python, "-c", "import peft"}, {}}})[0].exit_code != 0) {
      return std::string();
    }
    auto folder = test::temporary_folder();
    const auto ended =
        test::run_commands({{{python, FSDP_TEST_DIR "/cli/lora_models.py", folder}, {}}})[0];
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    return folder;
  }();
  return made;
}

#define SKIP_WITHOUT_PEFT()                  \
  if (folder_of_models().empty()) {          \
    GTEST_SKIP() << "peft is not installed"; \
  }

/// What peft found.
Tensor found_by_peft(
    const std::string& name,
    const std::string& key,
    at::IntArrayRef sizes,
    at::ScalarType dtype = torch::kFloat) {
  StateDict state;
  state.insert(key, torch::empty(sizes, dtype));
  load(state, folder_of_models() + "/" + name + ".safetensors");
  return std::get<Tensor>(state.at(key));
}

TEST(Lora, OptionIsReadAndWritten) {
  EXPECT_FALSE(Lora::parse("none"));
  const auto lora = Lora::parse("rank=16").value();
  EXPECT_EQ(lora.scale(), 2);
  EXPECT_EQ(lora.targets.size(), 7u);
  const auto chosen = Lora::parse("targets=v_proj+q_proj,alpha=0.5,rank=2").value();
  EXPECT_EQ(chosen.str(), "rank=2,alpha=0.5,targets=q_proj+v_proj");
  EXPECT_EQ(Lora::parse("rank=4,alpha=1.23456789,targets=q_proj")->alpha, 1.23456789);
  EXPECT_EQ(Lora::parse(chosen.str())->str(), chosen.str());
  EXPECT_TRUE(chosen.trains("q_proj"));
  EXPECT_FALSE(chosen.trains("k_proj"));
  for (const auto& [text, part] : std::map<std::string, std::string>{
           {"", "'' is not known"},
           {"16", "'16' is not known"},
           {"rank=0", "the rank must be a whole number"},
           {"rank=2.5", "the rank must be a whole number"},
           {"rank=2,rank=3", "rank is given twice"},
           {"rank=2,alpha=0", "alpha must be above 0"},
           {"rank=2,alpha=inf", "alpha must be above 0"},
           {"rank=2,", "'' is not known"},
           {"alpha=2", "give a rank"},
           {"rank=2,targets=qproj", "no projection 'qproj'; did you mean 'q_proj'?"},
           {"rank=2,targets=", "no projection ''"}}) {
    const auto message = message_of<ConfigError>([&] { (void)Lora::parse(text); });
    EXPECT_TRUE(contains(message, part)) << text << ": " << message;
  }
}

TEST(Lora, StepsAreThoseOfPeft) {
  SKIP_WITHOUT_PEFT();
  for (const std::string name : {"llama", "qwen3", "gemma"}) {
    for (const auto& shape : kMeshes) {
      for (const bool recomputes : {false, true}) {
        const auto folder = folder_of_models() + "/" + name;
        const auto adapter = read_adapter_config(folder + "-adapter");
        EXPECT_EQ(adapter.base, folder);
        run_ranks(static_cast<int>(shape.ranks()), [&](int) {
          SCOPED_TRACE(name + " on " + shape.str() + (recomputes ? ", recomputing" : ""));
          TrainConfig config;
          config.model = read_hf_config(folder).dims;
          config.model.lora = adapter.lora.str();
          config.activation_checkpointing = recomputes;
          const TrainMesh mesh(shape, c10::kCPU);
          auto model = build_sharded(config, mesh);
          to_empty(model, torch::kCPU);
          load_pretrained(model, folder);
          load_adapter(model, folder + "-adapter");
          std::map<std::string, Tensor> before;
          std::vector<Tensor> trained;
          for (const auto& item : model->named_parameters()) {
            before[item.key()] = item.value().detach().clone();
            if (is_adapter(item.key())) {
              trained.push_back(item.value());
            }
          }
          optim::AdamW optimizer(trained, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
          const auto rows = found_by_peft(name, "rows", {4, 33}, torch::kLong);
          const auto losses = found_by_peft(name, "losses", {3});
          for (int64_t step = 0; step < 3; ++step) {
            const auto scores = model(rows.narrow(1, 0, 32)).flatten(0, 1);
            const auto targets = rows.narrow(1, 1, 32).flatten();
            const auto loss = mesh.tensor ? parallel_cross_entropy(scores, targets, *mesh.tensor)
                                          : torch::nn::functional::cross_entropy(scores, targets);
            EXPECT_NEAR(loss.item<float>(), losses[step].item<float>(), 1e-5);
            loss.backward();
            for (const auto& item : model->named_parameters()) {
              EXPECT_EQ(item.value().grad().defined(), is_adapter(item.key())) << item.key();
              if (step == 0 && is_adapter(item.key())) {
                const auto grad = as_dtensor_grad(item.value()).full_tensor();
                const auto theirs = found_by_peft(name, "grad." + item.key(), grad.sizes());
                EXPECT_LT(max_difference(grad, theirs).item<float>(), 2e-6) << item.key();
              }
            }
            optimizer.step();
            optimizer.zero_grad();
          }
          for (const auto& item : model->named_parameters()) {
            if (is_adapter(item.key())) {
              const auto after = as_dtensor(item.value()).full_tensor();
              const auto theirs = found_by_peft(name, "after." + item.key(), after.sizes());
              EXPECT_LT(max_difference(after, theirs).item<float>(), 2e-3) << item.key();
              EXPECT_LT((after - theirs).abs().mean().item<float>(), 1e-5) << item.key();
            } else {
              EXPECT_SAME(item.value(), before.at(item.key()));
            }
          }
        });
      }
    }
  }
}

/// Weights that are not trained are kept as they are computed with, which changes no bit of the
/// result.
TEST(Lora, FrozenWeightsAreKeptAsTheyAreComputedWith) {
  SKIP_WITHOUT_PEFT();
  const auto folder = folder_of_models() + "/llama";
  run_ranks(2, [&](int) {
    TrainConfig config;
    config.model = read_hf_config(folder).dims;
    config.model.lora = read_adapter_config(folder + "-adapter").lora.str();
    config.param_dtype = "bf16";
    const TrainMesh mesh({.shard = 2}, c10::kCPU);
    auto model = build_sharded(config, mesh);
    auto all_in_fp32 = Transformer(config.model);
    for (auto& layer : all_in_fp32->layers) {
      fully_shard(layer, {.mesh = mesh.data, .mp_policy = config.precision()});
    }
    fully_shard(all_in_fp32, {.mesh = mesh.data, .mp_policy = config.precision()});
    to_empty(model, torch::kCPU);
    for (auto* each : {&model, &all_in_fp32}) {
      load_pretrained(*each, folder);
      load_adapter(*each, folder + "-adapter");
    }
    const auto rows = found_by_peft("llama", "rows", {4, 33}, torch::kLong);
    const auto scores_of = [&](Transformer& each) {
      const auto scores = each(rows.narrow(1, 0, 32));
      scores.square().sum().backward();
      return scores;
    };
    EXPECT_SAME(scores_of(model), scores_of(all_in_fp32));
    const auto theirs = all_in_fp32->named_parameters();
    for (const auto& item : model->named_parameters()) {
      EXPECT_EQ(
          item.value().scalar_type(), is_adapter(item.key()) ? torch::kFloat : torch::kBFloat16);
      if (is_adapter(item.key())) {
        EXPECT_SAME(item.value().grad(), theirs[item.key()].grad());
      }
    }
  });
}

double eval_loss(const std::string& checkpoint, const std::string& tokens) {
  const auto ended =
      run({"eval", "--checkpoint", checkpoint, "--data", tokens, "--context", "16", "--json"});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  return Json::parse(ended.output).at("loss").get<double>();
}

double python_loss(const std::string& folder, const std::string& tokens) {
  const auto ended = test::run_commands(
      {{{FSDP_TEST_PYTHON, FSDP_TEST_DIR "/cli/lora_models.py", folder, tokens}, {}}})[0];
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  const auto at = ended.output.rfind("{\"loss\"");
  return at == std::string::npos ? 0
                                 : Json::parse(ended.output.substr(at)).at("loss").get<double>();
}

std::string token_file(int64_t count, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  const auto tokens = torch::randint(250, {count}, generator).to(torch::kInt16);
  auto path = test::temporary_folder() + "/tokens.bin";
  std::ofstream(path, std::ios::binary)
      .write(static_cast<const char*>(tokens.data_ptr()), 2 * count);
  return path;
}

TEST(Lora, WhatIsTrainedLoadsInPeftAndInTransformers) {
  SKIP_WITHOUT_PEFT();
  const auto folder = test::temporary_folder();
  const auto base = folder_of_models() + "/qwen3";
  const auto data = token_file(20000, 1);
  const auto row = token_file(17, 2);
  const auto trained = run(
      {"train", "--from", base, "--lora", "rank=4,targets=q_proj+o_proj+up_proj", "--data", data,
       "--ranks", "2", "--context", "32", "--batch", "4", "--steps", "6", "--lr", "0.05", "--run",
       folder + "/run"});
  ASSERT_EQ(trained.exit_code, 0) << trained.output;
  EXPECT_TRUE(contains(trained.output, "parameters are trained")) << trained.output;
  for (const auto& tensor : inspect_checkpoint(folder + "/run").tensors) {
    EXPECT_TRUE(!tensor.name.starts_with("model.") || is_adapter(tensor.name)) << tensor.name;
  }
  const auto loss = eval_loss(folder + "/run", row);
  EXPECT_GT(std::abs(loss - eval_loss(base, row)), 1e-3); // training has changed it
  const auto exported = run({"export", folder + "/run", folder + "/adapter"});
  ASSERT_EQ(exported.exit_code, 0) << exported.output;
  const auto merged = run({"export", folder + "/run", folder + "/merged", "--merge"});
  ASSERT_EQ(merged.exit_code, 0) << merged.output;
  for (const auto* name : {"/adapter", "/merged"}) {
    SCOPED_TRACE(name);
    EXPECT_NEAR(python_loss(folder + name, row), loss, 1e-5);
    EXPECT_NEAR(eval_loss(folder + name, row), loss, 1e-5);
    EXPECT_TRUE(is_file(folder + name + "/tokenizer.json"));
  }
  const auto generated = [&](const std::string& checkpoint) {
    const auto ended = run(
        {"generate", "--checkpoint", folder + checkpoint, "--prompt", "import", "--tokens", "20",
         "--temperature", "0", "--raw"});
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    return ended.output;
  };
  EXPECT_EQ(generated("/run"), generated("/merged"));
  EXPECT_EQ(generated("/adapter"), generated("/merged"));
  const auto nothing = run({"export", folder + "/merged", folder + "/again", "--merge"});
  EXPECT_NE(nothing.exit_code, 0);
  EXPECT_FALSE(is_folder(folder + "/again"));
}

TEST(Lora, ARunGoesOnOnAnotherMesh) {
  SKIP_WITHOUT_PEFT();
  const auto folder = test::temporary_folder();
  const auto base = folder + "/base";
  std::filesystem::copy(folder_of_models() + "/llama", base);
  const auto data = token_file(20000, 3);
  const auto row = token_file(17, 2);
  const auto trained = [&](std::vector<std::string> more) {
    std::vector<std::string> words{"train"};
    words.insert(words.end(), more.begin(), more.end());
    const auto ended = run(words);
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
  };
  const std::vector<std::string> all{"--from",     base,        "--lora",  "rank=3", "--data",
                                     data,         "--context", "16",      "--lr",   "0.02",
                                     "--schedule", "constant",  "--batch", "4"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), all.begin(), all.end());
    return more;
  };
  trained(with({"--steps", "6", "--mesh", "shard=2", "--run", folder + "/whole"}));
  trained(with({"--steps", "3", "--mesh", "shard=2,tp=2", "--run", folder + "/half"}));
  trained({"--resume", folder + "/half", "--steps", "6", "--mesh", "dp=2,shard=2"});
  EXPECT_NEAR(eval_loss(folder + "/half", row), eval_loss(folder + "/whole", row), 1e-5);

  const auto refused = [&](const std::vector<std::string>& words, const std::string& part) {
    const auto ended = run(words);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(contains(ended.output, part)) << ended.output;
  };
  const auto resume = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"train", "--resume", folder + "/half", "--steps", "7"});
    return more;
  };
  refused(resume({"--lora", "rank=5"}), "is of a run with --lora rank=3,alpha=6");
  refused(
      {"train", "--go-on", "--run", folder + "/half", "--from", folder_of_models() + "/qwen3"},
      "did not begin with it");
  // Other weights under the same matrices would be silently wrong.
  std::filesystem::remove_all(base);
  std::filesystem::copy(folder_of_models() + "/llama", base);
  EXPECT_EQ(run(resume({"--no-save"})).exit_code, 0); // the same weights, copied again
  std::filesystem::remove(base + "/model.safetensors");
  std::filesystem::copy(folder_of_models() + "/llama-other/model.safetensors", base);
  refused(resume({}), "are not those that it was trained with; bring them back");
  refused(
      {"export", folder + "/half", folder + "/out", "--merge"},
      "are not those that it was trained with");
  refused(
      {"eval", "--checkpoint", folder + "/half", "--data", row},
      "are not those that it was trained with");
  std::filesystem::remove_all(base);
  refused(resume({}), "there is no folder " + base + " with the other weights");
  // They may have moved, and the adapter alone does not need them.
  EXPECT_EQ(run(resume({"--no-save", "--from", folder_of_models() + "/llama"})).exit_code, 0);
  refused(
      resume({"--from", folder_of_models() + "/llama-other"}), "are not those that it was trained");
  EXPECT_EQ(run({"export", folder + "/half", folder + "/adapter"}).exit_code, 0);
}

TEST(Lora, WhatDoesNotFitIsRefused) {
  SKIP_WITHOUT_PEFT();
  const auto refused = [&](std::vector<std::string> words, const std::string& part) {
    words.insert(words.begin(), {"train", "--dry-run"});
    const auto ended = run(words);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(contains(ended.output, part)) << ended.output;
  };
  const auto base = folder_of_models() + "/llama";
  refused({"--lora", "rank=4"}, "give its Hugging Face folder with --from");
  refused({"--lora", "rank=4", "--from", base, "--optimizer", "muon"}, "use --optimizer adamw");
  refused({"--from", base + "-adapter"}, "has no config.json");

  const auto message = [&](const char* key, const Json& value) {
    const auto folder = test::temporary_folder();
    auto json = Json::parse(read_file(base + "-adapter/adapter_config.json").value());
    json[key] = value;
    write_file(folder + "/adapter_config.json", json.dump());
    return message_of<ConfigError>([&] { read_adapter_config(folder); });
  };
  EXPECT_TRUE(contains(message("use_dora", true), "\"use_dora\" is true, which is not supported"));
  EXPECT_TRUE(contains(message("use_rslora", true), "\"use_rslora\" is true"));
  EXPECT_TRUE(contains(message("bias", "all"), "\"bias\" is \"all\""));
  EXPECT_TRUE(contains(message("peft_type", "IA3"), "\"peft_type\" is \"IA3\""));
  EXPECT_TRUE(contains(message("rank_pattern", {{"q_proj", 8}}), "\"rank_pattern\" is {"));
  EXPECT_TRUE(contains(message("modules_to_save", {"lm_head"}), "\"modules_to_save\": [\"lm_head"));
  EXPECT_TRUE(contains(message("target_modules", {"lm_head"}), "no projection 'lm_head'"));
  EXPECT_TRUE(contains(message("target_modules", ".*q"), "only a list of names is supported"));
  EXPECT_TRUE(contains(message("target_modules", Json::array()), "it trains no projection"));
  EXPECT_TRUE(contains(message("init_lora_weights", "pissa"), "\"init_lora_weights\" is \"pissa"));
  EXPECT_TRUE(contains(message("r", 0), "the rank must be"));
  EXPECT_TRUE(contains(message("base_model_name_or_path", "none/such"), "no such folder here"));
}

} // namespace
} // namespace fsdp::cli
