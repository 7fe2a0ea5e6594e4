#include "checkpoint/hf_layout.h"

#include <cstdio>

#include "base/check.h"
#include "checkpoint/json_text.h"
#include "checkpoint/manifest.h"

namespace fsdp::detail {

Catalog renamed(const Catalog& catalog, const Rename& rename, std::optional<at::ScalarType> dtype) {
  Catalog result;
  std::map<std::string, std::string> old_names; // by new name
  const auto new_name = [&](const std::string& old) {
    const auto [found, is_new] = old_names.emplace(rename(old), old);
    FSDP_CHECK_AS(
        ConfigError, is_new, "by these rules two names become '", found->first, "': '",
        found->second, "' and '", old, "'");
    return found->first;
  };
  for (const auto& tensor : catalog.tensors) {
    const bool converted = dtype && at::isFloatingType(tensor.dtype);
    result.tensors.push_back(
        {new_name(tensor.name), converted ? *dtype : tensor.dtype, tensor.sizes, {}});
  }
  for (const auto& [name, value] : catalog.values) {
    result.values.emplace_back(new_name(name), value);
  }
  return result;
}

HfLayout make_hf_layout(const Catalog& catalog, int64_t max_file_bytes) {
  HfLayout layout;
  int64_t file_bytes = 0;
  for (const auto& tensor : catalog.tensors) {
    SafetensorsEntry entry{tensor.name, tensor.dtype, tensor.sizes};
    if (layout.files.empty() || (file_bytes > 0 && entry.bytes() > max_file_bytes - file_bytes)) {
      layout.files.emplace_back();
      file_bytes = 0;
    }
    file_bytes += entry.bytes();
    layout.total_bytes += entry.bytes();
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
    if (i == 0 && !catalog.values.empty()) {
      file.header.metadata[kValuesKey] = values_text(catalog.values, file.name);
    }
    file.start = layout_safetensors(file.header, file.name);
    for (size_t j = 0; j < file.header.entries.size(); ++j) {
      layout.positions[file.header.entries[j].name] = {i, j};
    }
  }
  return layout;
}

void write_hf_index(const HfLayout& layout, const Path& folder) {
  if (layout.files.size() == 1) {
    return;
  }
  const auto file = folder / kHfIndexName;
  auto map = nlohmann::json::object();
  for (const auto& [name, position] : layout.positions) {
    map[name] = layout.files[position.file].name;
  }
  const nlohmann::json index{
      {"metadata", {{"total_size", layout.total_bytes}}}, {"weight_map", std::move(map)}};
  write_text(file, json_text(index, file.string()));
}

} // namespace fsdp::detail
