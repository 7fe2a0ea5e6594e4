#include <ATen/ATen.h>

#include <cstdio>
#include <map>

#include <fsdp/checkpoint.h>

#include "base/check.h"
#include "checkpoint/json_text.h"
#include "checkpoint/manifest.h"
#include "checkpoint/name_rules.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/writer.h"

namespace fsdp {

namespace {

using detail::Path;

/// One of the files, as all ranks compute it.
struct HfFile {
  std::string name;
  detail::SafetensorsHeader header;
  std::string start; // what comes before the tensors
};

/// Where a tensor lies.
struct HfPlace {
  size_t file = 0;
  size_t entry = 0;
};

struct HfLayout {
  std::vector<HfFile> files;
  std::map<std::string, HfPlace> places;    // by our names
  std::map<std::string, std::string> names; // ours to those in the files
  int64_t total_bytes = 0;
};

HfLayout make_layout(
    const detail::Catalog& catalog, const detail::NameRules& rename, const SaveHfOptions& options) {
  HfLayout layout;
  std::map<std::string, std::string> ours; // by the names in the files
  int64_t file_bytes = 0;
  for (const auto& tensor : catalog.tensors) {
    detail::SafetensorsEntry entry{rename(tensor.name), tensor.dtype, tensor.sizes};
    if (options.dtype && at::isFloatingType(tensor.dtype)) {
      entry.dtype = *options.dtype;
    }
    const auto [other, is_new] = ours.emplace(entry.name, tensor.name);
    FSDP_CHECK_AS(
        CheckpointError, is_new, "[save_hf] '", other->second, "' and '", tensor.name,
        "' would both be '", entry.name, "' in the files");
    if (layout.files.empty() ||
        (file_bytes > 0 && entry.bytes() > options.max_file_bytes - file_bytes)) {
      layout.files.emplace_back();
      file_bytes = 0;
    }
    file_bytes += entry.bytes();
    layout.total_bytes += entry.bytes();
    layout.names[tensor.name] = entry.name;
    layout.files.back().header.entries.push_back(std::move(entry));
  }
  for (size_t i = 0; i < layout.files.size(); ++i) {
    auto& file = layout.files[i];
    char name[64] = "model.safetensors";
    if (layout.files.size() > 1) {
      std::snprintf(
          name, sizeof(name), "model-%05zu-of-%05zu.safetensors", i + 1, layout.files.size());
    }
    file.name = name;
    file.header.metadata = {{"format", "pt"}};
    file.start = detail::layout_safetensors(file.header, file.name);
    for (size_t j = 0; j < file.header.entries.size(); ++j) {
      layout.places[ours.at(file.header.entries[j].name)] = {i, j};
    }
  }
  return layout;
}

/// Headers, and the files' full sizes. The ranks write in any order.
void write_headers(const HfLayout& layout, const Path& folder) {
  for (const auto& item : layout.files) {
    const auto file = detail::File::create(folder / item.name);
    const auto& entries = item.header.entries;
    file.resize(entries.back().offset + entries.back().bytes());
    file.write(0, item.start.data(), static_cast<int64_t>(item.start.size()));
    file.sync();
  }
}

/// This rank's parts, each at its place in the whole tensors.
void write_parts(
    const HfLayout& layout, const std::vector<detail::Part>& parts, const Path& folder) {
  std::map<size_t, detail::File> files;
  for (const auto& part : parts) {
    const auto place = layout.places.at(part.name);
    const auto& item = layout.files[place.file];
    const auto& entry = item.header.entries[place.entry];
    auto found = files.find(place.file);
    if (found == files.end()) {
      found = files.emplace(place.file, detail::File::create(folder / item.name)).first;
    }
    const auto host = detail::host_bytes(part.data.to(entry.dtype));
    const auto* bytes = static_cast<const char*>(host.const_data_ptr());
    const auto element_bytes = static_cast<int64_t>(host.element_size());
    detail::for_each_run(
        part.box, {part.box.offsets, part.box.sizes},
        {std::vector<int64_t>(entry.sizes.size(), 0), entry.sizes},
        [&](const detail::CopyRun& run) {
          found->second.write(
              entry.offset + run.to * element_bytes, bytes + run.from * element_bytes,
              run.length * element_bytes);
        });
  }
  for (const auto& [number, file] : files) {
    file.sync();
  }
}

/// Which parts this rank has written, for rank 0 to check that none is missing.
std::string parts_text(const detail::SavePlan& plan) {
  detail::Catalog catalog;
  std::map<std::string, size_t> index;
  for (const auto& part : plan.parts) {
    const auto [place, is_new] = index.emplace(part.name, catalog.tensors.size());
    if (is_new) {
      catalog.tensors.push_back(*plan.catalog.find_tensor(part.name));
    }
    detail::StoredPiece piece{"model.safetensors", 0, part.box, {}};
    catalog.tensors[place->second].pieces.push_back(std::move(piece));
  }
  return detail::manifest_text(catalog, "[save_hf]");
}

void write_index(const HfLayout& layout, const Path& folder) {
  if (layout.files.size() == 1) {
    return;
  }
  const auto file = folder / "model.safetensors.index.json";
  auto map = nlohmann::json::object();
  for (const auto& [ours, place] : layout.places) {
    map[layout.names.at(ours)] = layout.files[place.file].name;
  }
  const nlohmann::json index{
      {"metadata", {{"total_size", layout.total_bytes}}}, {"weight_map", std::move(map)}};
  detail::write_text(file, detail::json_text(index, file.string()));
}

} // namespace

void save_hf(
    const StateDict& state, const std::filesystem::path& folder, const SaveHfOptions& options) {
  TORCH_CHECK_VALUE(
      options.max_file_bytes > 0, "[save_hf] max_file_bytes is ", options.max_file_bytes);
  const detail::NameRules rename(options.names);
  at::NoGradGuard no_grad;
  detail::finish_previous_save();
  StateDict tensors; // there is no place for other values
  for (const auto& [key, value] : state) {
    if (detail::local_tensor(value)) {
      tensors.insert(key, value);
    }
  }
  const auto job = detail::begin_save(tensors, folder, {.timeout = options.timeout});
  const auto data = job.publication.data();
  HfLayout layout;
  detail::publish(
      job.publication, {.write =
                            [&] {
                              layout = make_layout(job.plan.catalog, rename, options);
                              if (job.publication.rank == 0) {
                                write_headers(layout, data);
                              }
                              write_parts(layout, job.plan.parts, data);
                              return parts_text(job.plan);
                            },
                        .finish =
                            [&](const std::vector<std::string>& texts) {
                              detail::merge_catalogs(job.plan, texts, job.publication.target);
                              write_index(layout, data);
                            }});
}

} // namespace fsdp
