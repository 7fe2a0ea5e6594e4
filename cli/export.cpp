// `fsdp export`: writes the model of a run as a folder that Hugging Face's transformers loads.
#include <fsdp/checkpoint_tools.h>
#include <fsdp/error.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/config/hf_config.h"
#include "cli/files.h"
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
  explicit NewFolder(const std::string& out)
      : out_(out), path_(out + ".unfinished." + std::to_string(getpid())) {
    check_config(
        !is_file(out) && (!is_folder(out) || std::filesystem::is_empty(out)), out,
        " exists already; choose another name");
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
    rmdir(out_.c_str()); // if it is there, it is empty
    if (std::rename(path_.c_str(), out_.c_str()) != 0) {
      throw_cannot_write(out_);
    }
  }

 private:
  const std::string out_;
  const std::string path_;
};

/// config.json of the model. That of the folder which the run began with has more: the numbers of
/// special tokens, for example.
nlohmann::ordered_json config_for(const TrainConfig& config, const std::string& dtype) {
  const auto original = read_file(config.from + "/config.json");
  auto json = !config.from.empty() && original ? nlohmann::ordered_json::parse(*original)
                                               : hf_config_json(config.model, config.context);
  json.erase("dtype");
  json["torch_dtype"] = dtype == "bf16" ? "bfloat16" : dtype == "fp16" ? "float16" : "float32";
  return json;
}

int export_run(const ExportOptions& options) {
  const auto saved = find_saved_run(options.run, "RUN", /*model_only=*/true);
  warn_of_skipped(saved);
  const auto& config = saved.identity.config;
  const auto dtype = options.dtype.empty() ? config.shard_dtype : options.dtype;
  NewFolder folder(options.out);
  const auto json = config_for(config, dtype);
  const auto report = convert_checkpoint(
      saved.path, folder.path(),
      {.names = {{.from = "model\\.(lm_head\\..*)", .to = "$1"}},
       .only = "model\\..*",
       .dtype = dtype_of(dtype)});
  write_file(folder.path() + "/config.json", json.dump(2) + "\n");
  std::vector<std::string> copied;
  for (const auto* name : kCopied) {
    const auto from = config.from + "/" + name;
    if (!config.from.empty() && is_file(from)) {
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
