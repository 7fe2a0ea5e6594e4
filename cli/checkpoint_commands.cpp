// `fsdp inspect`, `fsdp verify` and `fsdp convert`: list, check and convert checkpoints.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <fsdp/checkpoint_tools.h>

#include "cli/check.h"
#include "cli/command.h"
#include "cli/files.h"
#include "cli/train/progress.h"
#include "cli/train/run_checkpoint.h"

namespace fsdp::cli {

namespace {

using nlohmann::ordered_json;

constexpr const char* kPathHelp =
    "A run's folder or a folder of checkpoints (the latest is used), a checkpoint, a folder of "
    "torch.distributed.checkpoint, a Hugging Face folder or a safetensors file";

std::string hex(uint32_t number) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", number);
  return text;
}

std::string time_text(int64_t nanoseconds) {
  const auto seconds = static_cast<std::time_t>(nanoseconds / 1'000'000'000);
  char text[32] = {};
  tm utc{};
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", gmtime_r(&seconds, &utc));
  return text;
}

template <class Value>
ordered_json value_json(const Value& value) {
  return std::visit([](const auto& held) { return ordered_json(held); }, value);
}

/// In JSON.
const char* format_of(const CheckpointContents& contents) {
  return contents.is_ours  ? "fsdp"
         : contents.is_dcp ? "torch.distributed.checkpoint"
                           : "safetensors";
}

std::string format_text(const CheckpointContents& contents) {
  if (contents.is_ours) {
    return "fsdp, saved " + time_text(contents.time);
  }
  return contents.is_dcp ? "torch.distributed.checkpoint" : "safetensors files";
}

/// The first string, followed by " +n" if there are n more. "-" if there are none.
std::string first_of(const std::vector<std::string>& all) {
  return all.empty() ? "-" : all[0] + (all.size() > 1 ? c10::str(" +", all.size() - 1) : "");
}

/// Prints rows in columns, below an empty line. The first row has the titles; alone it is not
/// printed. The columns in `right` are aligned to the right, the others to the left.
void print_table(const std::vector<std::vector<std::string>>& rows, const std::set<size_t>& right) {
  constexpr size_t kWidest = 100; // one very long name must not widen all rows
  if (rows.size() == 1) {
    return;
  }
  std::cout << '\n';
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], std::min(row[i].size(), kWidest));
    }
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string gap(widths[i] - std::min(row[i].size(), widths[i]), ' ');
      line += (i > 0 ? "  " : "") + (right.contains(i) ? gap + row[i] : row[i] + gap);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    std::cout << line << '\n';
  }
}

std::vector<std::string> table_row(const CheckpointTensor& tensor) {
  std::vector<std::string> files;
  std::set<std::string> known;
  std::vector<std::string> checksums;
  for (const auto& piece : tensor.pieces) {
    if (known.insert(piece.file).second) {
      files.push_back(piece.file);
    }
    for (const auto checksum : piece.checksums) {
      checksums.push_back(hex(checksum));
    }
  }
  return {
      printable(tensor.name),
      tensor.dtype,
      ordered_json(tensor.shape).dump(),
      std::to_string(tensor.bytes),
      std::to_string(tensor.pieces.size()),
      printable(first_of(files)),
      first_of(checksums)};
}

struct Totals {
  std::set<std::string> files;
  int64_t bytes = 0;
  int64_t unchecked = 0; // tensors without checksums
};

Totals totals_of(const CheckpointContents& contents) {
  Totals totals;
  for (const auto& tensor : contents.tensors) {
    totals.bytes += tensor.bytes;
    bool checked = true;
    for (const auto& piece : tensor.pieces) {
      totals.files.insert(piece.file);
      checked = checked && !piece.checksums.empty();
    }
    // A folder of torch.distributed.checkpoint has checksums in its archives, which inspect does
    // not open.
    totals.unchecked += !checked && tensor.bytes > 0 && !contents.is_dcp;
  }
  return totals;
}

void print_json(const CheckpointContents& contents) {
  const auto totals = totals_of(contents);
  ordered_json result{{"path", contents.path.string()},  {"format", format_of(contents)},
                      {"time_ns", contents.time},        {"bytes", totals.bytes},
                      {"files", totals.files},           {"tensors", ordered_json::array()},
                      {"values", ordered_json::object()}};
  for (const auto& tensor : contents.tensors) {
    auto pieces = ordered_json::array();
    for (const auto& piece : tensor.pieces) {
      auto checksums = ordered_json::array();
      for (const auto checksum : piece.checksums) {
        checksums.push_back(hex(checksum));
      }
      pieces.push_back(
          {{"file", piece.file},
           {"offset", piece.offset},
           {"offsets", piece.offsets},
           {"sizes", piece.sizes},
           {"crc32c", std::move(checksums)}});
    }
    result["tensors"].push_back(
        {{"name", tensor.name},
         {"dtype", tensor.dtype},
         {"shape", tensor.shape},
         {"bytes", tensor.bytes},
         {"pieces", std::move(pieces)}});
  }
  // An ordered object looks for each new name among all others. These names all differ already.
  auto& values = result["values"].get_ref<ordered_json::object_t&>();
  for (const auto& [name, value] : contents.values) {
    static_cast<ordered_json::object_t::Container&>(values).emplace_back(name, value_json(value));
  }
  if (contents.is_dcp) {
    result["objects"] = ordered_json::array();
  }
  for (const auto& object : contents.objects) {
    result["objects"].push_back(
        {{"name", object.name}, {"type", object.type}, {"bytes", object.bytes}});
  }
  std::cout << result.dump(2) << '\n';
}

int inspect(const std::string& path, bool json) {
  const auto contents = inspect_checkpoint(path);
  if (json) {
    print_json(contents);
    return 0;
  }
  Screen screen;
  screen.labelled("path", printable(contents.path.string()));
  screen.labelled("format", format_text(contents));
  std::vector<std::vector<std::string>> tensors{
      {"TENSOR", "DTYPE", "SHAPE", "BYTES", "PIECES", "FILES", "CRC32C"}};
  for (const auto& tensor : contents.tensors) {
    tensors.push_back(table_row(tensor));
  }
  print_table(tensors, {3, 4});
  std::vector<std::vector<std::string>> values{{"VALUE", ""}};
  for (const auto& [name, value] : contents.values) {
    values.push_back({printable(name), printable(value_json(value).dump())});
  }
  print_table(values, {});
  std::vector<std::vector<std::string>> objects{{"OBJECT", "TYPE", "BYTES"}};
  for (const auto& object : contents.objects) {
    objects.push_back(
        {printable(object.name), object.type.empty() ? "-" : printable(object.type),
         std::to_string(object.bytes)});
  }
  print_table(objects, {2});
  const auto totals = totals_of(contents);
  std::cout << '\n';
  screen.labelled(
      "total", c10::str(
                   plural(std::ssize(contents.tensors), "tensor"), ", ", binary_size(totals.bytes),
                   " in ", plural(std::ssize(totals.files), "file"), "; ",
                   plural(std::ssize(contents.values), "value"),
                   contents.objects.empty()
                       ? ""
                       : "; " + plural(std::ssize(contents.objects), "object") + " of Python",
                   totals.unchecked > 0
                       ? c10::str("; ", plural(totals.unchecked, "tensor"), " without checksums")
                       : ""));
  return 0;
}

int verify(const std::string& path) {
  const auto report = verify_checkpoint(path);
  Screen screen;
  screen.labelled("path", printable(report.path.string()));
  for (const auto& problem : report.problems) {
    screen.labelled("bad", printable(problem));
  }
  if (report.unchecked_bytes > 0) {
    screen.labelled(
        "note", c10::str(
                    binary_size(report.unchecked_bytes), " of ", binary_size(report.bytes),
                    " have no checksums, so changed bytes in them cannot be detected; ",
                    "fsdp convert --format sharded adds checksums"));
  }
  const auto read = c10::str(
      plural(report.num_tensors, "tensor"), ", ", binary_size(report.bytes), " in ",
      plural(report.num_files, "file"));
  if (report.problems.empty()) {
    screen.labelled("good", read);
    return 0;
  }
  screen.labelled("result", plural(std::ssize(report.problems), "problem") + "; read " + read);
  return 1;
}

const std::map<std::string, at::ScalarType> kDtypes{
    {"fp64", at::ScalarType::Double},
    {"fp32", at::ScalarType::Float},
    {"bf16", at::ScalarType::BFloat16},
    {"fp16", at::ScalarType::Half},
    {"fp8_e4m3", at::ScalarType::Float8_e4m3fn},
    {"fp8_e5m2", at::ScalarType::Float8_e5m2}};

struct ConvertWords {
  std::string input;
  std::string output;
  std::string format = "full";
  std::string dtype;
  int ranks = 0; // 0: not given
  uint64_t files_of = 0;
  std::vector<std::string> renames;
  std::string only;
  bool overwrite = false;
};

ConvertOptions convert_options(const ConvertWords& words) {
  ConvertOptions options{.overwrite = words.overwrite};
  const bool full = words.format == "full";
  options.format = full ? ConvertOptions::Format::full : ConvertOptions::Format::sharded;
  check_config(
      !full || words.ranks == 0, "--ranks ", words.ranks, ": only valid with --format sharded");
  check_config(
      full || words.files_of == 0, "--files-of: only valid with --format full; a sharded ",
      "checkpoint has one file per rank, see --ranks");
  check_config(
      !words.output.ends_with(".safetensors"), words.output,
      ": the output is a folder; choose a name without .safetensors");
  if (words.ranks > 0) {
    options.num_ranks = words.ranks;
  }
  if (words.files_of > 0) {
    options.max_file_bytes = static_cast<int64_t>(std::min<uint64_t>(words.files_of, INT64_MAX));
  }
  if (!words.dtype.empty()) {
    options.dtype = kDtypes.at(words.dtype);
  }
  if (!words.only.empty()) {
    options.only = words.only;
  }
  for (const auto& rule : words.renames) {
    const auto at = rule.rfind('='); // FROM may contain '=', as in (?=...)
    check_config(
        at != std::string::npos && at > 0, "--rename '", rule,
        "': it must be FROM=TO, for example 'model\\.(.*)=$1'");
    options.names.push_back({rule.substr(0, at), rule.substr(at + 1)});
  }
  return options;
}

/// Throws ConfigError if OUT is a checkpoint of a training run that could not be resumed any more.
void check_no_run_is_lost(const ConvertWords& words, const ConvertOptions& options) {
  if (!words.overwrite || !is_file(words.output + "/manifest.json")) {
    return;
  }
  const bool keeps_all = options.format == ConvertOptions::Format::sharded && !options.only &&
                         !options.dtype && options.names.empty();
  const auto values = inspect_checkpoint(words.output).values;
  const bool of_run =
      std::ranges::any_of(values, [](const auto& value) { return value.first == kRunMark; });
  check_config(
      !of_run || (keeps_all && real_path(inspect_checkpoint(words.input).path.string()) ==
                                   real_path(words.output)),
      words.output, " is a checkpoint of a training run, which could not be resumed from it any ",
      "more; write to another folder");
}

/// The first names, and how many others there are.
std::string names_of(const std::vector<std::string>& all) {
  constexpr int64_t kMaxNamed = 20;
  const auto more = std::max<int64_t>(0, std::ssize(all) - kMaxNamed);
  const auto text = c10::Join(", ", std::vector(all.begin(), all.end() - more));
  return more > 0 ? c10::str(text, " and ", more, " others") : text;
}

int convert(const ConvertWords& words) {
  const auto options = convert_options(words);
  check_no_run_is_lost(words, options);
  const auto report = convert_checkpoint(words.input, words.output, options);
  if (!report.left_out.empty()) {
    std::cerr << "fsdp: warning: left out " << plural(std::ssize(report.left_out), "object")
              << " that only Python can read: " << printable(names_of(report.left_out))
              << std::endl;
  }
  Screen screen;
  screen.labelled("read", printable(report.input.string()));
  screen.labelled(
      "wrote", c10::str(
                   printable(words.output), ": ", plural(report.num_tensors, "tensor"), ", ",
                   binary_size(report.bytes), " in ", plural(report.num_files, "file")));
  return 0;
}

} // namespace

void add_inspect(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("inspect", "List the contents of a checkpoint");
  auto path = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);
  command->add_option("path", *path, kPathHelp)->required();
  command->add_flag("--json", *json, "Print JSON, with every piece and checksum");
  command->callback([=, &action] { action = [=] { return inspect(*path, *json); }; });
}

void add_verify(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("verify", "Read a whole checkpoint and check it for damage");
  auto path = std::make_shared<std::string>();
  command->add_option("path", *path, kPathHelp)->required();
  command->footer("Exit code: 0 good, 1 bad, 4 no checkpoint found.");
  command->callback([=, &action] { action = [=] { return verify(*path); }; });
}

void add_convert(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("convert", "Write a checkpoint in another format, dtype or naming");
  auto words = std::make_shared<ConvertWords>();
  command->add_option("in", words->input, kPathHelp)->required();
  command->add_option("out", words->output, "Folder to write")->required();
  command
      ->add_option(
          "--format", words->format,
          "full: whole tensors in a Hugging Face style folder; sharded: the format of fsdp's own "
          "checkpoints")
      ->check(CLI::IsMember({"full", "sharded"}))
      ->capture_default_str();
  command->add_option("--dtype", words->dtype, "Convert floating-point tensors to this dtype")
      ->check(CLI::IsMember(kDtypes));
  command->add_option("--ranks", words->ranks, "Number of files, for --format sharded [1]")
      ->check(CLI::Range(1, 1 << 20));
  command
      ->add_option(
          "--files-of", words->files_of,
          "Largest size of a file with --format full, e.g. 5GB [5GiB]")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true));
  // No extra arguments: CLI11 would read "[1,2]" as two values.
  command
      ->add_option(
          "--rename", words->renames,
          "'FROM=TO': names that match the regular expression FROM become TO, which may contain "
          "$1; can be repeated, the first match counts")
      ->allow_extra_args(false);
  command->add_option(
      "--only", words->only, "Convert only names that match this regular expression");
  command->add_flag("--overwrite", words->overwrite, "Replace an existing checkpoint at OUT");
  command->footer(
      "Example: export the model of a training run for other tools:\n"
      "  fsdp convert runs/1/checkpoints hf --dtype bf16 --only 'model\\..*' "
      "--rename 'model\\.(.*)=$1'");
  command->callback([=, &action] { action = [=] { return convert(*words); }; });
}

} // namespace fsdp::cli
