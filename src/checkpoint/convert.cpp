#include <ATen/ATen.h>

#include <regex>

#include <fsdp/checkpoint_tools.h>

#include "base/check.h"
#include "checkpoint/hf_layout.h"
#include "checkpoint/name_rules.h"
#include "checkpoint/reader.h"
#include "checkpoint/writer.h"

namespace fsdp {

namespace {

using namespace detail;

/// A box of an input tensor, and its entry in an output file.
struct Item {
  const StoredTensor* source = nullptr;
  Box box;
  SafetensorsEntry entry;
};

struct OutputFile {
  std::string name;
  std::string start; // the bytes before the tensors
  std::vector<Item> items;
};

/// Keeps only the tensors and values whose whole names match `only`.
Catalog select(Catalog catalog, const std::optional<std::string>& only) {
  if (!only) {
    return catalog;
  }
  const auto pattern = user_pattern(*only, "the pattern of names");
  std::erase_if(
      catalog.tensors, [&](const auto& item) { return !std::regex_match(item.name, pattern); });
  std::erase_if(
      catalog.values, [&](const auto& item) { return !std::regex_match(item.first, pattern); });
  std::erase_if(
      catalog.objects, [&](const auto& item) { return !std::regex_match(item.name, pattern); });
  FSDP_CHECK_AS(
      ConfigError, !catalog.tensors.empty(), "no tensor has a name that '", *only,
      "' matches all of");
  catalog.index(catalog.folder.string());
  return catalog;
}

/// Throws CheckpointError if the output would replace the input, which lies at `checkpoint`, and
/// hold less than it: `tensors` and `values` less, or no checksums.
void check_nothing_lost(
    const Catalog& input,
    const Path& checkpoint,
    size_t tensors,
    size_t values,
    bool checksums,
    const Path& output) {
  if (!is_folder(output) || Folder(output).identity() != input.opened->identity()) {
    return;
  }
  FSDP_CHECK_AS(
      CheckpointError, is_folder(checkpoint), output.string(), " would be replaced by ",
      checkpoint.filename().string(), " alone, which is one of its files; write to another folder");
  FSDP_CHECK_AS(
      CheckpointError, tensors + values == 0, output.string(),
      " would be replaced by a part of itself: ", tensors, " tensors and ", values,
      " values would be lost; write to another folder");
  FSDP_CHECK_AS(
      CheckpointError, checksums || input.id.empty(), output.string(),
      " would lose its manifest and checksums; write to another folder");
}

std::vector<OutputFile> full_files(
    const HfLayout& layout, const Catalog& input, const Catalog& output) {
  std::vector<OutputFile> files;
  for (const auto& file : layout.files) {
    files.push_back({file.name, file.start, {}});
    for (const auto& entry : file.header.entries) {
      files.back().items.push_back({nullptr, Box::whole(entry.sizes), entry});
    }
  }
  for (size_t i = 0; i < output.tensors.size(); ++i) {
    const auto position = layout.positions.at(output.tensors[i].name);
    files[position.file].items[position.entry].source = &input.tensors[i];
  }
  return files;
}

/// Returns the rows of tensor `number` that `rank` writes, if any. Rows are divided as torch::chunk
/// divides them. The ranks take turns with scalars and empty tensors.
std::optional<Box> rows_of(const StoredTensor& tensor, size_t number, int rank, int num_ranks) {
  auto box = Box::whole(tensor.sizes);
  if (box.sizes.empty() || box.numel() == 0) {
    return static_cast<int>(number % static_cast<size_t>(num_ranks)) == rank
               ? std::optional(std::move(box))
               : std::nullopt;
  }
  const auto rows = box.sizes[0];
  const auto chunk = rows / num_ranks + (rows % num_ranks != 0);
  const auto begin = std::min(chunk * rank, rows);
  box.offsets[0] = begin;
  box.sizes[0] = std::min(chunk, rows - begin);
  return box.sizes[0] > 0 ? std::optional(std::move(box)) : std::nullopt;
}

std::vector<OutputFile> sharded_files(
    const Catalog& input, const Catalog& output, const ConvertOptions& options) {
  std::vector<OutputFile> files;
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    OutputFile file{rank_name(rank) + ".safetensors", "", {}};
    std::vector<SafetensorsEntry> entries;
    std::map<std::string, std::vector<int64_t>> offsets;
    std::map<std::string, Item> items;
    for (size_t i = 0; i < output.tensors.size(); ++i) {
      const auto& tensor = output.tensors[i];
      if (auto box = rows_of(tensor, i, rank, options.num_ranks)) {
        entries.push_back({tensor.name, tensor.dtype, box->sizes});
        offsets[tensor.name] = box->offsets;
        items[tensor.name] = {&input.tensors[i], std::move(*box), {}};
      }
    }
    if (entries.empty()) {
      continue;
    }
    auto header = shard_header(std::move(entries), offsets, file.name);
    file.start = layout_safetensors(header, file.name);
    for (const auto& entry : header.entries) {
      auto& item = items.at(entry.name);
      item.entry = entry;
      file.items.push_back(std::move(item));
    }
    files.push_back(std::move(file));
  }
  return files;
}

/// Writes the output files. Returns the pieces of each tensor, for the manifest.
Pieces write_files(
    const std::vector<OutputFile>& files,
    const Catalog& input,
    const ConvertOptions& options,
    const Path& folder) {
  Reader reader(input, /*verify=*/true);
  Pieces pieces;
  for (const auto& item : files) {
    FileWriter file(folder / item.name, /*direct=*/false);
    file.append(item.start.data(), static_cast<int64_t>(item.start.size()));
    for (const auto& [source, box, entry] : item.items) {
      // The reader uses only the sizes of the local tensor, so it needs no memory.
      const LocalTensor target{
          at::empty(box.sizes, at::device(at::kMeta)),
          source->sizes,
          {{box, std::vector<int64_t>(box.sizes.size(), 0)}}};
      auto data = reader.read(*source, target);
      if (options.change) {
        data = options.change(source->name, data).contiguous();
        TORCH_CHECK_VALUE(
            data.sizes() == box.sizes, "[convert_checkpoint] `change` made a tensor of shape ",
            data.sizes(), " of ", source->name, ", which has shape ", box.sizes);
      }
      data = data.to(entry.dtype);
      pieces[entry.name].push_back({item.name, entry.offset, box, append_blocks(file, data)});
    }
    file.finish();
  }
  return pieces;
}

} // namespace

ConvertReport convert_checkpoint(
    const std::filesystem::path& input_path,
    const std::filesystem::path& output_path,
    const ConvertOptions& options) {
  TORCH_CHECK_VALUE(
      options.num_ranks >= 1 && options.max_file_bytes >= 1, "[convert_checkpoint] num_ranks is ",
      options.num_ranks, ", max_file_bytes ", options.max_file_bytes);
  const bool full = options.format == ConvertOptions::Format::full;
  TORCH_CHECK_VALUE(
      full || !options.change,
      "[convert_checkpoint] `change` needs whole tensors, so the format must be full");
  at::NoGradGuard no_grad;
  const auto rename = renaming_by(options.names);
  const auto checkpoint = find_checkpoint(input_path);
  auto all = open_catalog(checkpoint);
  const auto num_tensors = all.tensors.size();
  const auto num_values = all.values.size();
  const auto input = select(std::move(all), options.only);
  check_nothing_lost(
      input, checkpoint, num_tensors - input.tensors.size(), num_values - input.values.size(),
      /*checksums=*/!full, output_path);
  FSDP_CHECK_AS(
      CheckpointError, !full || !input.tensors.empty(), input_path.string(), " holds no tensors");
  auto output = renamed(input, rename, options.dtype);
  const auto layout = full ? make_hf_layout(output, options.max_file_bytes) : HfLayout();
  const auto files =
      full ? full_files(layout, input, output) : sharded_files(input, output, options);

  Publication publication;
  publication.target = clean_path(output_path);
  publication.overwrite = options.overwrite;
  prepare(publication);
  publish(
      publication, {.write =
                        [&] {
                          auto pieces = write_files(files, input, options, publication.data());
                          for (auto& tensor : output.tensors) {
                            tensor.pieces = std::move(pieces[tensor.name]);
                          }
                          return std::string();
                        },
                    .finish =
                        [&](const std::vector<std::string>&) {
                          if (full) {
                            write_hf_index(layout, publication.data());
                          } else {
                            complete(output, publication);
                          }
                        }});
  ConvertReport report{
      .num_files = static_cast<int64_t>(files.size()),
      .num_tensors = static_cast<int64_t>(output.tensors.size()),
      .input = checkpoint};
  for (const auto& tensor : output.tensors) {
    report.bytes += tensor_bytes(tensor.sizes, tensor.dtype).value();
  }
  for (const auto& object : input.objects) {
    report.left_out.push_back(object.name);
  }
  return report;
}

} // namespace fsdp
