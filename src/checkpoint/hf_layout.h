#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/catalog.h"
#include "checkpoint/name_rules.h"
#include "checkpoint/safetensors.h"

namespace fsdp::detail {

/// A file of a Hugging Face folder. All ranks compute the same layout.
struct HfFile {
  std::string name;
  SafetensorsHeader header;
  std::string start; // the bytes before the tensors
};

/// The position of a tensor: the index of its file, and of its entry in the file's header.
struct HfPosition {
  size_t file = 0;
  size_t entry = 0;
};

struct HfLayout {
  std::vector<HfFile> files;
  std::map<std::string, HfPosition> positions; // by name
  int64_t total_bytes = 0;
};

/// Returns the catalog's tensors and values, in their order, under their names in the files and
/// without pieces. Floating point tensors become `dtype`. Throws ConfigError if two names become
/// the same.
Catalog renamed(const Catalog& catalog, const Rename& rename, std::optional<at::ScalarType> dtype);

HfLayout make_hf_layout(const Catalog& catalog, int64_t max_file_bytes);

/// Writes model.safetensors.index.json, unless there is only one file.
void write_hf_index(const HfLayout& layout, const Path& folder);

} // namespace fsdp::detail
