// Hugging Face folders that the tool reads and writes.
#include "cli/hf_models.h"

#include <fsdp/launch.h>
#include <malloc.h>

#include <fstream>
#include <map>
#include <set>

#include "cli/config/presets.h"
#include "cli/files.h"
#include "cli/generate/language_model.h"
#include "cli/scoped_process_group.h"
#include "cli/tiny_run.h"
#include "cli/train/rotary.h"
#include "cli/train/token_source.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;
using test::message_of;
using test::run;
using torch::Tensor;
using Json = nlohmann::ordered_json;

// ------------------------------------------------------------ Large folders

/// Writes the folder of a model, in which all weights are 0. The files are sparse, so that they
/// take no room.
std::string write_sparse_folder(const ModelDims& dims, size_t tensors_per_file) {
  auto folder = test::temporary_folder();
  write_file(folder + "/config.json", hf_config_json(dims, 1024).dump());
  const MetaInit on_meta;
  const Transformer model(dims);
  const auto params = model->named_parameters();
  Json index;
  for (size_t first = 0; first < params.size(); first += tensors_per_file) {
    const auto name = "model-" + std::to_string(first) + ".safetensors";
    Json header;
    int64_t end = 0;
    for (size_t i = first; i < std::min(first + tensors_per_file, params.size()); ++i) {
      const auto key = (params[i].key().starts_with("lm_head") ? "" : "model.") + params[i].key();
      const auto start = std::exchange(end, end + 2 * params[i].value().numel());
      header[key] = Json{
          {"dtype", "BF16"},
          {"shape", params[i].value().sizes().vec()},
          {"data_offsets", {start, end}}};
      index["weight_map"][key] = name;
    }
    auto text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const auto size = static_cast<uint64_t>(text.size());
    std::ofstream file(folder + "/" + name, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&size), 8);
    file << text;
    file.close();
    std::filesystem::resize_file(folder + "/" + name, 8 + text.size() + static_cast<size_t>(end));
  }
  write_file(folder + "/model.safetensors.index.json", index.dump());
  return folder;
}

/// A number from a file of /proc/self.
int64_t number_of_process(const std::string& file, const std::string& key) {
  std::ifstream lines("/proc/self/" + file);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(key)) {
      return std::stoll(line.substr(key.size()));
    }
  }
  return 0;
}

// 70 billion parameters in bf16 are 131 GiB, and each of 512 ranks has 263 MiB of them.
TEST(HfFolder, ARankReadsAndHoldsItsPartOfALargeFolder) {
  const int64_t ranks = 512;
  mallopt(M_MMAP_THRESHOLD, 1 << 17); // freed memory goes back at once, so that what is held counts
  const auto folder = write_sparse_folder(model_preset("70b"), 64);
  const ScopedProcessGroup joined(
      {.backend = "fake", .rank = 3, .world_size = static_cast<int>(ranks)});
  for (const std::string dtype : {"bf16", "fp32"}) {
    SCOPED_TRACE(dtype);
    TrainConfig config;
    config.model = read_hf_config(folder).dims;
    config.shard_dtype = dtype;
    auto model = build_sharded(config, TrainMesh({.shard = ranks}, c10::kCPU));
    to_empty(model, torch::kCPU);
    const auto part = shard_bytes(model);
    const auto in_files = part * 2 / static_cast<int64_t>(c10::elementSize(dtype_of(dtype)));
    std::ofstream("/proc/self/clear_refs") << 5; // the peak begins again
    const auto read_before = number_of_process("io", "rchar: ");
    const auto held_before = number_of_process("status", "VmHWM:") << 10;
    load_pretrained(model, folder);
    const auto read = number_of_process("io", "rchar: ") - read_before;
    const auto held = (number_of_process("status", "VmHWM:") << 10) - held_before;
    std::cout << "part " << part << ", read " << read << ", held beside it " << held << std::endl;
    EXPECT_GE(read, in_files);
    EXPECT_LE(read, in_files * 5 / 2); // `load` checks first, so it may read twice
    EXPECT_LE(held, part / 4);         // the shards themselves were there before
    for (const auto& param : model->parameters()) {
      EXPECT_EQ(param.count_nonzero().item<int64_t>(), 0); // to_empty leaves NaN
    }
  }
}

// ------------------------------------------------------------ The tool

TEST(HfFolder, WhatDoesNotFitIsRefusedBeforeAnythingIsWritten) {
  const ModelDims dims{
      .vocab = 300, .dim = 32, .layers = 2, .heads = 4, .kv_heads = 2, .hidden = 48};
  const auto folder = write_sparse_folder(dims, 100); // in one file
  const auto file = folder + "/model-0.safetensors";
  const auto config = read_file(folder + "/config.json").value();
  const auto tokens = test::temporary_folder() + "/t.bin";
  const auto write_tokens = [&](uint16_t last) {
    std::vector<uint16_t> numbers(4000, 7);
    numbers.back() = last;
    std::ofstream(tokens, std::ios::binary)
        .write(reinterpret_cast<const char*>(numbers.data()), 8000);
  };
  write_tokens(8);
  const auto run_folder = test::temporary_folder() + "/run";
  const auto train = [&](std::vector<std::string> more) {
    std::vector<std::string> words{"train",     "--from",  folder,    "--data", tokens,
                                   "--context", "8",       "--batch", "2",      "--steps",
                                   "1",         "--ranks", "2",       "--run",  run_folder};
    words.insert(words.end(), more.begin(), more.end());
    return run(words);
  };
  const auto expect_refused = [](const test::Ended& ended, const std::string& part) {
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(contains(ended.output, part)) << ended.output;
    EXPECT_EQ(test::count(ended.output, "\n"), 1) << ended.output;
  };
  const auto refused = [&](const std::string& part) {
    SCOPED_TRACE(part);
    for (const auto& more : std::vector<std::vector<std::string>>{{}, {"--dry-run"}}) {
      expect_refused(train(more), part);
      EXPECT_FALSE(std::filesystem::exists(run_folder));
    }
  };
  const auto models_refused = [&](const std::string& part) {
    refused(part);
    expect_refused(run({"eval", "--checkpoint", folder, "--data", tokens}), part);
    expect_refused(
        run({"generate", "--checkpoint", folder, "--tokenizer", "bytes", "--prompt", "a"}), part);
  };
  const auto with = [&](const char* key, int64_t value) {
    auto json = Json::parse(config);
    json[key] = value;
    write_file(folder + "/config.json", json.dump());
  };
  with("intermediate_size", 64);
  models_refused("_proj.weight' has the sizes [");
  with("num_hidden_layers", 3);
  models_refused("no safetensors file holds 'model.layers.2.");
  with("num_hidden_layers", 1);
  models_refused("has no 'model.layers.1.");
  write_file(folder + "/config.json", config);
  write_tokens(300);
  refused("has token 300 at position 3999");
  write_tokens(8);

  const auto size = std::filesystem::file_size(file);
  std::filesystem::resize_file(file, size - 1);
  models_refused("the file is truncated");
  std::filesystem::remove(file);
  std::filesystem::remove(folder + "/model.safetensors.index.json");
  write_file(folder + "/model.safetensors", "version https://git-lfs.github.com/spec/v1\n");
  models_refused("model.safetensors");
}

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

TEST(HfFolder, ARunFromScratchIsExported) {
  SKIP_WITHOUT_TRANSFORMERS();
  const auto folder = test::temporary_folder() + "/run";
  for (const auto& [name, more] : std::map<std::string, std::vector<std::string>>{
           {"llama", {}},
           {"mistral", {"--window", "9", "--tied", "true"}},
           {"qwen2", {"--qkv-bias", "true", "--rotary-scaling", "llama3:4,1,4,16"}},
           {"gemma", {"--gemma", "true", "--tied", "true", "--head-dim", "16"}},
           {"gemma2",
            {"--gemma", "true", "--sandwich-norms", "true", "--window", "9", "--full-every", "2",
             "--attention-cap", "20", "--score-cap", "10"}},
           {"gemma3",
            {"--gemma", "true", "--sandwich-norms", "true", "--qk-norm", "true", "--window", "9",
             "--window-rotary-base", "100", "--attention-size", "30"}}}) {
    SCOPED_TRACE(name);
    auto words = test::tiny_options(test::text_file(), {"--run", folder + name, "--steps", "3"});
    words.insert(words.end(), more.begin(), more.end());
    const auto trained = run(words);
    ASSERT_EQ(trained.exit_code, 0) << trained.output;
    expect_export_is_read(folder + name);
  }
}

TEST(HfFolder, ARunOnTokensIsExportedWithTheirTokenizer) {
  SKIP_WITHOUT_TOKENIZER();
  const auto from = models().folder + "/qwen3"; // of which only the tokenizer is used
  const auto end = Tokenizer::read(from).find("<|endoftext|>").value();
  const auto folder = test::temporary_folder();
  const auto data = folder + "/t.bin";
  ASSERT_EQ(run({"tokenize", "--tokenizer", from, "--out", data, test::text_file()}).exit_code, 0);
  const auto trained = [&](const std::string& name, const std::string& vocab) {
    const auto ended = run(
        {"train", "--data", data, "--vocab", vocab, "--dim", "32", "--layers", "1", "--context",
         "8", "--batch", "4", "--steps", "1", "--device", "cpu", "--run", folder + "/" + name});
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    return folder + "/" + name;
  };
  const auto run_folder = trained("run", "300");
  const auto config_of_export = [&](const std::string& name, std::vector<std::string> more) {
    more.insert(more.begin(), {"export", run_folder, folder + "/" + name});
    const auto exported = run(more);
    EXPECT_EQ(exported.exit_code, 0) << exported.output;
    const auto ended = test::run_commands(
        {{{FSDP_TEST_PYTHON, FSDP_TEST_DIR "/cli/hf_models.py", "tokens", folder + "/" + name},
          {}}})[0];
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    const auto at = ended.output.rfind("{\"");
    return at == std::string::npos ? Json::object() : Json::parse(ended.output.substr(at));
  };
  const auto plain = config_of_export("plain", {});
  EXPECT_TRUE(plain.at("eos").is_null()) << plain; // not the 2 of transformers' LlamaConfig
  EXPECT_TRUE(plain.at("bos").is_null()) << plain;
  EXPECT_TRUE(plain.at("generates_until").is_null()) << plain;
  const auto whole = config_of_export("whole", {"--tokenizer", from});
  EXPECT_EQ(whole.at("eos"), end) << whole;
  EXPECT_EQ(whole.at("generates_until"), end) << whole;
  EXPECT_EQ(whole.at("tokenizer"), Json(Tokenizer::read(from).encode("import torch"))) << whole;
  EXPECT_EQ(find_language_model(run_folder, from).ends, std::set<int64_t>{end});

  const auto none = run({"export", run_folder, folder + "/none", "--tokenizer", folder});
  EXPECT_EQ(none.exit_code, 2) << none.output;
  EXPECT_TRUE(contains(none.output, "--tokenizer: there is no tokenizer.json in")) << none.output;
  EXPECT_FALSE(is_folder(folder + "/none"));
  const auto other = folder + "/other"; // with a token that the model lacks
  std::filesystem::create_directory(other);
  std::ofstream(other + "/tokenizer.json") << R"({"model": {"type": "BPE", "vocab": {"a": 300}}})";
  const auto beyond = run({"export", run_folder, folder + "/none", "--tokenizer", other});
  EXPECT_EQ(beyond.exit_code, 2) << beyond.output;
  EXPECT_TRUE(contains(beyond.output, "its token 300 is none of the model")) << beyond.output;
  EXPECT_FALSE(is_folder(folder + "/none"));
}

TEST(HfFolder, TextBecomesTokensOfTheFolder) {
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
  std::ofstream(other + "/tokenizer.json")
      << R"({"normalizer": {"type": "Lowercase"}, "model": {"type": "BPE"}})";
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

TEST(HfFolder, TrainStartsFromAFolder) {
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
