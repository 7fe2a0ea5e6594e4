#include "checkpoint/hf_layout.h"

#include <cstdio>

#include "base/check.h"
#include "checkpoint/json_text.h"

namespace fsdp::detail {

HfLayout make_hf_layout(
    const Catalog& catalog,
    const NameRules& rename,
    int64_t max_file_bytes,
    std::optional<at::ScalarType> dtype) {
  HfLayout layout;
  std::map<std::string, std::string> ours; // name in the files to name in the catalog
  int64_t file_bytes = 0;
  for (const auto& tensor : catalog.tensors) {
    SafetensorsEntry entry{rename(tensor.name), tensor.dtype, tensor.sizes};
    if (dtype && at::isFloatingType(tensor.dtype)) {
      entry.dtype = *dtype;
    }
    const auto [other, is_new] = ours.emplace(entry.name, tensor.name);
    FSDP_CHECK_AS(
        CheckpointError, is_new, "'", other->second, "' and '", tensor.name, "' would both be '",
        entry.name, "' in the files");
    if (layout.files.empty() || (file_bytes > 0 && entry.bytes() > max_file_bytes - file_bytes)) {
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
    file.start = layout_safetensors(file.header, file.name);
    for (size_t j = 0; j < file.header.entries.size(); ++j) {
      layout.places[ours.at(file.header.entries[j].name)] = {i, j};
    }
  }
  return layout;
}

void write_hf_index(const HfLayout& layout, const Path& folder) {
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
  write_text(file, json_text(index, file.string()));
}

} // namespace fsdp::detail
