// `fsdp export`: writes the model of a run as a folder that Hugging Face's transformers loads.
#include <fsdp/checkpoint_tools.h>
#include <fsdp/error.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/config/hf_config.h"
#include "cli/files.h"
#include "cli/train/pretrained.h"
#include "cli/train/progress.h"
#include "cli/train/run_checkpoint.h"

namespace fsdp::cli {

namespace {

struct ExportOptions {
  std::string run;
  std::string out;
  std::string dtype;
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

int export_run(const ExportOptions& options) {
  const auto saved = find_saved_run(options.run, "RUN", /*model_only=*/true);
  warn_of_skipped(saved);
  const auto& config = saved.identity.config;
  const auto dtype = options.dtype.empty() ? config.shard_dtype : options.dtype;
  NewFolder folder(options.out);
  const auto original = original_config(config);
  auto json = original.value_or(hf_config_json(config.model, config.context));
  json.erase("dtype");
  json["torch_dtype"] = dtype == "bf16" ? "bfloat16" : dtype == "fp16" ? "float16" : "float32";
  const auto report = convert_checkpoint(
      saved.path, folder.path(),
      {.names = hf_names(), .only = "model\\..*", .dtype = dtype_of(dtype)});
  write_file(folder.path() + "/config.json", json.dump(2) + "\n");
  std::vector<std::string> copied;
  for (const auto* name : kCopied) {
    const auto from = config.from + "/" + name;
    if (original && is_file(from)) {
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
          printable(options.out), ": config.json, ", plural(report.num_tensors, "tensor"), " in ",
          dtype, ", ", binary_size(report.bytes), " in ", plural(report.num_files, "file"),
          copied.empty() ? ""
                         : ", and " + plural(static_cast<int64_t>(copied.size()), "file") + " of " +
                               printable(config.from)));
  return 0;
}

} // namespace

void add_export(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "export", "Write the model of a run as a folder for Hugging Face's transformers");
  auto options = std::make_shared<ExportOptions>();
  command
      ->add_option("run", options->run, "A run's folder (its newest checkpoint), or a checkpoint")
      ->required();
  command->add_option("out", options->out, "Folder to write")->required();
  command->add_option("--dtype", options->dtype, "bf16, fp16 or fp32 [as the run kept it]")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}));
  command->callback([options, &action] { action = [options] { return export_run(*options); }; });
}

} // namespace fsdp::cli
