// `fsdp export`: writes the model of a run as a folder that Hugging Face's transformers or peft
// loads.
#include <fsdp/checkpoint_tools.h>
#include <fsdp/error.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/config/adapter_config.h"
#include "cli/config/hf_config.h"
#include "cli/config/json_fields.h"
#include "cli/files.h"
#include "cli/json_text.h"
#include "cli/text/documents.h"
#include "cli/train/pretrained.h"
#include "cli/train/progress.h"
#include "cli/train/run_checkpoint.h"

namespace fsdp::cli {

namespace {

struct ExportOptions {
  std::string run;
  std::string out;
  std::string dtype;
  std::string tokenizer; // a folder
  bool merge = false;    // the matrices of LoRA into the weights that they belong to
};

/// Files of a Hugging Face folder that belong to the model and that training does not change.
constexpr const char* kCopied[] = {
    "added_tokens.json", "chat_template.jinja",     "generation_config.json",
    "merges.txt",        "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model",   "tokenizer_config.json",   "vocab.json"};

/// A folder that is removed unless it gets its final name.
class NewFolder {
 public:
  explicit NewFolder(std::string out) : out_(std::move(out)) {
    while (out_.size() > 1 && out_.ends_with('/')) {
      out_.pop_back();
    }
    struct stat status{};
    check_config(lstat(out_.c_str(), &status) != 0, out_, " exists already; choose another name");
    path_ = out_ + ".unfinished." + std::to_string(getpid());
  }
  ~NewFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::string& path() const {
    return path_;
  }
  void finish() {
    if (std::rename(path_.c_str(), out_.c_str()) != 0) {
      throw_cannot_write(out_);
    }
  }

 private:
  std::string out_;
  std::string path_;
};

/// config.json of the folder that the run began with. It has more than the sizes: the numbers of
/// special tokens, for example. Empty, with a warning, if it is not there or is of another model
/// now.
std::optional<nlohmann::ordered_json> original_config(const TrainConfig& config) {
  if (config.from.empty()) {
    return std::nullopt;
  }
  std::string why = "it describes another model now";
  try {
    const auto [dims, longest] = read_hf_config(config.from);
    if (hf_config_json(dims, 0) == hf_config_json(config.model, 0)) {
      return nlohmann::ordered_json::parse(*read_file(config.from + "/config.json"));
    }
  } catch (const ConfigError& error) {
    why = error.what_without_backtrace();
  }
  std::cerr << "fsdp: warning: config.json of " << config.from
            << " is not used, and the files of its "
            << "tokenizer are not copied: " << why << std::endl;
  return std::nullopt;
}

/// Throws if the vocabulary of a tokenizer has tokens that the model lacks. Added tokens may be
/// beyond it: Gemma 3 has one for images, which the models for text lack.
void check_vocabulary(const nlohmann::json& tokenizer, const std::string& folder, int64_t vocab) {
  for (const auto& [text, id] : tokenizer.at("/model/vocab"_json_pointer).items()) {
    check_config(
        !id.is_number_integer() || id.get<int64_t>() < vocab, "--tokenizer ", folder,
        ": its token ", id.dump(), " is none of the model, which has the tokens 0 to ", vocab - 1,
        "; give the tokenizer of its data");
  }
}

/// Sets what config.json says of the special tokens of a tokenizer, if the tokenizer has them.
void set_special_tokens(nlohmann::ordered_json& json, const std::string& folder) {
  const auto tokenizer = read_object(folder + "/tokenizer.json");
  const auto added = tokenizer.value("added_tokens", nlohmann::json::array());
  const auto vocab = json.at("vocab_size").get<int64_t>();
  if (tokenizer.contains("/model/vocab"_json_pointer)) {
    check_vocabulary(tokenizer, folder, vocab);
  }
  for (const std::string name : {"bos_token", "eos_token"}) {
    const auto text = special_text(folder, name);
    nlohmann::ordered_json id;
    for (const auto& token : added) {
      if (text && token.is_object() && token.contains("content") && token["content"] == *text) {
        id = token.contains("id") ? token["id"] : nullptr;
        check_config(
            id.is_number_integer() && id.get<int64_t>() >= 0 && id.get<int64_t>() < vocab,
            "--tokenizer ", folder, ": its ", name, " is ", id.dump(),
            ", and the model has the tokens 0 to ", vocab - 1, "; give the tokenizer of its data");
      }
    }
    auto& known = json[name + "_id"];
    const bool is_one_of_several =
        known.is_array() && std::find(known.begin(), known.end(), id) != known.end();
    if (!is_one_of_several) {
      known = id;
    }
  }
}

/// The matrices of LoRA in a checkpoint, by their names in a Hugging Face folder.
StateDict read_adapters(const SavedRun& saved) {
  StateDict state;
  for (const auto& tensor : inspect_checkpoint(saved.path).tensors) {
    if (tensor.name.starts_with("model.")) {
      state.insert(tensor.name, torch::empty(tensor.shape));
    }
  }
  load(state, saved.path);
  return state;
}

/// Writes a folder of PEFT.
ConvertReport write_adapter(
    const SavedRun& saved, const std::string& dtype, const std::string& folder) {
  const auto& config = saved.identity.config;
  const auto report = convert_checkpoint(
      saved.path, folder,
      {.max_file_bytes = std::numeric_limits<int64_t>::max(), // PEFT reads one file only
       .names = adapter_names(),
       .only = "model\\..*",
       .dtype = dtype_of(dtype)});
  std::filesystem::rename(folder + "/model.safetensors", folder + "/adapter_model.safetensors");
  const AdapterConfig adapter{*Lora::parse(config.model.lora), config.from};
  write_file(folder + "/adapter_config.json", adapter_config_json(adapter).dump(2) + "\n");
  return report;
}

/// Writes the weights of --from with LoRA's matrices added to them, one tensor at a time.
/// An empty `dtype` leaves theirs as it is.
ConvertReport write_merged(
    const SavedRun& saved, const std::string& dtype, const std::string& folder) {
  const auto& config = saved.identity.config;
  const auto scale = Lora::parse(config.model.lora)->scale();
  const auto adapters = read_adapters(saved);
  const auto merged = [&](const std::string& name, const torch::Tensor& weight) {
    const auto projection = name.substr(0, name.rfind('.'));
    if (!name.ends_with(".weight") || !adapters.contains(projection + ".lora_A.weight")) {
      return weight;
    }
    const auto& a = std::get<torch::Tensor>(adapters.at(projection + ".lora_A.weight"));
    const auto& b = std::get<torch::Tensor>(adapters.at(projection + ".lora_B.weight"));
    return weight.to(torch::kFloat) + scale * b.matmul(a);
  };
  ConvertOptions options{.change = merged};
  if (!dtype.empty()) {
    options.dtype = dtype_of(dtype);
  }
  return convert_checkpoint(config.from, folder, options);
}

int export_run(const ExportOptions& options) {
  const auto saved = find_saved_run(options.run, "RUN", /*model_only=*/true);
  warn_of_skipped(saved);
  const auto& config = saved.identity.config;
  if (options.merge) {
    check_weights(saved, config.from);
  }
  check_config(
      config.has_lora() || !options.merge, "--merge: ", saved.path.string(),
      " is of a run without --lora, so there is nothing to merge");
  check_config(
      options.tokenizer.empty() || Tokenizer::is_in(options.tokenizer),
      "--tokenizer: there is no tokenizer.json in ", options.tokenizer);
  if (!options.tokenizer.empty()) {
    (void)JsonFields::read(options.tokenizer + "/tokenizer.json"); // throws if it is damaged
  }
  const auto dtype = options.dtype.empty() && !options.merge ? config.shard_dtype : options.dtype;
  NewFolder folder(options.out);
  const auto original = original_config(config);
  const bool is_adapter = config.has_lora() && !options.merge;
  auto json = original.value_or(hf_config_json(config.model, config.context));
  if (!dtype.empty()) {
    json.erase("dtype");
    json["torch_dtype"] = dtype == "bf16" ? "bfloat16" : dtype == "fp16" ? "float16" : "float32";
  }
  if (!options.tokenizer.empty()) {
    set_special_tokens(json, options.tokenizer); // before the weights, because it may throw
  }
  ConvertReport report;
  if (is_adapter) {
    report = write_adapter(saved, dtype, folder.path());
  } else if (options.merge) {
    report = write_merged(saved, dtype, folder.path());
  } else {
    report = convert_checkpoint(
        saved.path, folder.path(),
        {.names = hf_names(), .only = "model\\..*", .dtype = dtype_of(dtype)});
  }
  if (!is_adapter) {
    write_file(folder.path() + "/config.json", json.dump(2) + "\n");
  }
  const auto source = !options.tokenizer.empty() ? options.tokenizer : original ? config.from : "";
  std::vector<std::string> copied;
  for (const auto* name : kCopied) {
    const auto from = source + "/" + name;
    // How to generate belongs to the model of the folder.
    const bool belongs = options.tokenizer.empty() || name != std::string("generation_config.json");
    if (!source.empty() && belongs && is_file(from)) {
      const auto text = read_file(from);
      check_config(text.has_value(), from, " cannot be read: ", std::strerror(errno));
      write_file(folder.path() + "/" + name, *text);
      copied.emplace_back(name);
    }
  }
  folder.finish();
  Screen screen;
  screen.labelled("read", printable(saved.path.string()));
  screen.labelled(
      "wrote",
      c10::str(
          printable(options.out), is_adapter ? ": adapter_config.json, " : ": config.json, ",
          plural(report.num_tensors, "tensor"), dtype.empty() ? "" : " in " + dtype, ", ",
          binary_size(report.bytes), " in ", plural(report.num_files, "file"),
          copied.empty()
              ? ""
              : ", and " + plural(std::ssize(copied), "file") + " of " + printable(source)));
  return 0;
}

} // namespace

void add_export(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "export",
      "Write the model of a run as a folder for Hugging Face's transformers, or for peft");
  auto options = std::make_shared<ExportOptions>();
  command
      ->add_option("run", options->run, "A run's folder (its newest checkpoint), or a checkpoint")
      ->required();
  command->add_option("out", options->out, "Folder to write")->required();
  command
      ->add_option(
          "--dtype", options->dtype,
          "bf16, fp16 or fp32 [as the run kept it; with --merge, as --from has it]")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}));
  command->add_option(
      "--tokenizer", options->tokenizer,
      "Folder whose tokenizer files are copied; config.json gets its special tokens [--from]");
  command->add_flag(
      "--merge", options->merge,
      "Add the matrices of --lora to the weights of --from; without it, only the matrices are "
      "written, as an adapter for peft");
  command->callback([options, &action] { action = [options] { return export_run(*options); }; });
}

} // namespace fsdp::cli
