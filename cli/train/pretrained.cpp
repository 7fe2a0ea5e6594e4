#include "cli/train/pretrained.h"

#include <fsdp/checkpoint_tools.h>
#include <fsdp/meta_init.h>
#include <fsdp/state_dict.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/hash.h"
#include "cli/json_text.h"
#include "cli/mapped_file.h"
#include "cli/train/lora.h"

namespace fsdp::cli {

namespace {

constexpr const char* kHead = "lm_head.weight";
constexpr const char* kEmbedding = "model.embed_tokens.weight";

/// The names of the files that the folder's index lists. Empty without an index.
std::set<std::string> files_in_index(const std::string& folder) {
  const auto path = folder + "/model.safetensors.index.json";
  const auto text = read_file(path);
  std::set<std::string> files;
  if (text) {
    try {
      const auto index = nlohmann::json::parse(*text);
      for (const auto& [tensor, file] : index.at("weight_map").items()) {
        files.insert(file.get<std::string>());
      }
    } catch (const nlohmann::json::exception& error) {
      throw_config_error("--from: ", path, " cannot be read: ", json_problem(error));
    }
  }
  return files;
}

/// The name in a Hugging Face folder of a parameter of Transformer.
std::string hf_name(const std::string& name) {
  return name.starts_with("lm_head.") ? name : "model." + name;
}

/// What the safetensors files of a folder hold.
CheckpointContents contents_of(const std::string& folder) {
  try {
    return inspect_checkpoint(folder);
  } catch (const CheckpointError& error) {
    throw_config_error(
        "the weights of ", folder, " cannot be read: ", error.what_without_backtrace());
  }
}

/// Some programs write the weight that the embedding and the output layer share twice. Throws
/// ConfigError if the two differ.
void check_shared_head(
    const std::string& folder, const CheckpointTensor& head, const CheckpointTensor& embedding) {
  const MappedFile head_file(folder + "/" + head.pieces.front().file, "--from: ");
  const MappedFile embedding_file(folder + "/" + embedding.pieces.front().file, "--from: ");
  const auto bytes = [](const MappedFile& file, const CheckpointTensor& tensor) {
    return file.text().substr(
        static_cast<size_t>(tensor.pieces.front().offset), static_cast<size_t>(tensor.bytes));
  };
  check_config(
      head.dtype == embedding.dtype && bytes(head_file, head) == bytes(embedding_file, embedding),
      "--from ", folder, ": config.json has tie_word_embeddings, but ", kHead,
      " is not the weight of the embedding");
}

/// Throws if this rank has a value that is not finite.
void check_finite(const StateDict& weights, const std::string& folder) {
  for (const auto& [name, value] : weights) {
    const auto* const spread = std::get_if<DTensor>(&value);
    const auto* const whole = std::get_if<at::Tensor>(&value);
    const auto local = spread ? spread->to_local() : whole ? *whole : at::Tensor();
    check_config(
        !local.defined() || local.isfinite().all().item<bool>(), folder, ": '", name,
        "' has a value that is not finite; take undamaged weights");
  }
}

/// Throws if a tensor of a file is stored in a way that takes more than its numbers.
void check_dtype(const CheckpointTensor& tensor, const std::string& folder) {
  const auto& dtype = tensor.dtype;
  check_config(
      dtype == "F32" || dtype == "BF16" || dtype == "F16" || dtype == "F64", folder, ": '",
      tensor.name, "' is stored as ", dtype, " in ", tensor.pieces.front().file,
      "; only weights in F64, F32, F16 and BF16 can be read");
}

} // namespace

std::vector<NameRule> hf_names() {
  return {{.from = "model\\.(lm_head\\..*)", .to = "$1"}};
}

std::vector<NameRule> adapter_names() {
  return {{.from = "model\\.(.*)", .to = "base_model.model.model.$1"}};
}

void check_weight_files(const std::string& folder) {
  check_config(is_folder(folder), "--from: there is no folder ", folder);
  const auto indexed = files_in_index(folder);
  const bool whole = is_file(folder + "/model.safetensors");
  check_config(
      indexed.empty() || !whole || indexed.contains("model.safetensors"), "--from ", folder,
      ": it has both model.safetensors and model.safetensors.index.json, which lists other files; "
      "remove one of the two");
  for (const auto& file : indexed) {
    check_config(
        is_file(folder + "/" + file), "--from ", folder, ": there is no ", file,
        ", which model.safetensors.index.json lists");
  }
  check_config(
      whole || !indexed.empty(), "--from ", folder, " has no model.safetensors",
      is_file(folder + "/pytorch_model.bin") || is_file(folder + "/pytorch_model.bin.index.json")
          ? "; its weights are in pytorch_model.bin, and save_pretrained of transformers writes "
            "them again as safetensors"
          : "");
}

void check_weights_fit(ModelDims dims, const std::string& folder) {
  const auto contents = contents_of(folder);
  dims.lora = "none";
  std::map<std::string, std::vector<int64_t>> wanted; // shapes by name
  {
    const MetaInit on_meta;
    const Transformer model(dims);
    for (const auto& item : model->named_parameters()) {
      wanted[hf_name(item.key())] = item.value().sizes().vec();
    }
  }
  constexpr const char* kRemedy = "; take config.json and the weights from the same model";
  const CheckpointTensor* head = nullptr;
  const CheckpointTensor* embedding = nullptr;
  for (const auto& tensor : contents.tensors) {
    if (dims.tied && tensor.name == kHead) {
      head = &tensor;
      wanted[kHead] = {dims.vocab, dims.dim};
    } else if (tensor.name == kEmbedding) {
      embedding = &tensor;
    }
    const auto& file = tensor.pieces.front().file;
    check_dtype(tensor, folder);
    const auto found = wanted.find(tensor.name);
    if (found == wanted.end()) {
      check_config(
          tensor.name.ends_with("rotary_emb.inv_freq"), folder,
          ": the model that config.json describes has no '", tensor.name, "', which ", file,
          " holds", kRemedy);
      continue;
    }
    check_config(
        tensor.shape == found->second, folder, ": '", tensor.name, "' has the sizes ",
        at::IntArrayRef(tensor.shape), " in ", file, ", and the model that config.json describes ",
        "needs ", at::IntArrayRef(found->second), kRemedy);
    wanted.erase(found);
  }
  check_config(
      wanted.empty(), folder, ": no safetensors file holds '",
      wanted.empty() ? "" : wanted.begin()->first, "', which the model that config.json describes ",
      "needs", kRemedy);
  if (head) {
    check_shared_head(folder, *head, *embedding);
  }
}

std::string weights_fingerprint(const std::string& folder) {
  constexpr int64_t kSample = 4096; // bytes at the beginning, in the middle and at the end of each
  uint64_t hash = 0;
  std::map<std::string, std::ifstream> files;
  for (const auto& tensor : inspect_checkpoint(folder).tensors) {
    hash = add_to_hash(hash, tensor.name + tensor.dtype + c10::str(at::IntArrayRef(tensor.shape)));
    for (const auto& piece : tensor.pieces) {
      auto& file = files[piece.file];
      if (!file.is_open()) {
        file.open(folder + "/" + piece.file, std::ios::binary);
      }
      const auto size = std::min(kSample, tensor.bytes);
      for (const auto start : {int64_t{0}, (tensor.bytes - size) / 2, tensor.bytes - size}) {
        std::string sample(static_cast<size_t>(size), '\0');
        file.clear();
        file.seekg(piece.offset + start);
        file.read(sample.data(), size);
        hash = add_to_hash(hash, sample);
      }
    }
  }
  return std::to_string(hash);
}

void load_adapter(Transformer& model, const std::string& folder) {
  const auto file = folder + "/adapter_model.safetensors";
  check_config(is_file(file), folder, " has no adapter_model.safetensors");
  StateDict state;
  state.insert_all(get_model_state_dict(model, {.ignore_frozen_params = true}), "model.");
  for (const auto& tensor : inspect_checkpoint(file).tensors) {
    const std::string prefix = "base_model.model.";
    check_config(
        tensor.name.starts_with(prefix) && state.contains(tensor.name.substr(prefix.size())), file,
        ": the model that adapter_config.json describes has no '", tensor.name, "'");
    check_dtype(tensor, folder);
  }
  load(state, file, {.names = adapter_names()});
  check_finite(state, folder);
}

void load_pretrained(Transformer& model, const std::string& folder) {
  StateDict state;
  for (const auto& [name, value] : get_model_state_dict(model)) {
    if (!is_adapter(name)) {
      state.insert("model." + name, value);
    }
  }
  // A block at a time: `load` may keep what it has read until it has read all.
  std::map<std::string, StateDict> blocks;
  for (const auto& [name, value] : state) {
    const std::string prefix = "model.layers.";
    const bool of_block = name.starts_with(prefix);
    blocks[of_block ? name.substr(0, name.find('.', prefix.size())) : ""].insert(name, value);
  }
  for (auto& [name, block] : blocks) {
    load(block, folder, {.names = hf_names()});
    check_finite(block, folder);
  }
}

} // namespace fsdp::cli
