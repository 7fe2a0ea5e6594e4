#pragma once

// Models that hf_models.py writes with transformers, for the tests that compare with it.

#include <fsdp/checkpoint.h>
#include <fsdp/error.h>
#include <fsdp/meta_init.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "cli/config/hf_config.h"
#include "cli/text/tokenizer.h"
#include "cli/train/pretrained.h"
#include "cli/train/trainer.h"
#include "support/processes.h"

namespace fsdp::cli {

/// The folder that hf_models.py has filled, and the names of its models. Empty without
/// transformers.
struct Models {
  std::string folder;
  std::vector<std::string> names;
};

inline const Models& models() {
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
    EXPECT_GE(result.names.size(), 17u) << ended.output;
    return result;
  }();
  return made;
}

/// Says why a folder's tokenizer cannot be read. Empty if it can.
inline std::string no_tokenizer() {
  try {
    Tokenizer::read(models().folder + "/qwen3");
    return "";
  } catch (const ConfigError& error) {
    return error.what_without_backtrace();
  }
}

#define SKIP_WITHOUT_TRANSFORMERS()                  \
  if (models().names.empty()) {                      \
    GTEST_SKIP() << "transformers is not installed"; \
  }

#define SKIP_WITHOUT_TOKENIZER()                   \
  SKIP_WITHOUT_TRANSFORMERS();                     \
  if (test::contains(no_tokenizer(), "without")) { \
    GTEST_SKIP() << no_tokenizer();                \
  }

/// What transformers found.
inline torch::Tensor expected(
    const std::string& name,
    const std::string& key,
    at::IntArrayRef sizes,
    at::ScalarType dtype = torch::kFloat) {
  StateDict state;
  state.insert(key, torch::empty(sizes, dtype));
  load(state, models().folder + "/" + name + ".safetensors");
  return std::get<torch::Tensor>(state.at(key));
}

inline torch::Tensor rows_of(const std::string& name) {
  return expected(name, "rows", {4, 33}, torch::kLong);
}

inline TrainConfig config_of(const std::string& name, const MeshShape& mesh) {
  TrainConfig config;
  config.model = read_hf_config(models().folder + "/" + name).dims;
  config.mesh = mesh;
  return config;
}

inline Transformer loaded(
    const TrainConfig& config, const TrainMesh& mesh, const std::string& name) {
  auto model = build_sharded(config, mesh);
  to_empty(model, torch::kCPU);
  load_pretrained(model, models().folder + "/" + name);
  return model;
}

inline torch::Tensor max_difference(const torch::Tensor& a, const torch::Tensor& b) {
  return (a - b).abs().max();
}

inline const std::vector<MeshShape> kMeshes{
    {}, {.shard = 3}, {.replicate = 2, .shard = 2}, {.shard = 2, .tensor = 2}};

} // namespace fsdp::cli
