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

/// Where a tensor lies: the index of its file, and of its entry in the file's header.
struct HfPlace {
  size_t file = 0;
  size_t entry = 0;
};

struct HfLayout {
  std::vector<HfFile> files;
  std::map<std::string, HfPlace> places;    // by name in the catalog
  std::map<std::string, std::string> names; // name in the catalog to name in the files
  int64_t total_bytes = 0;
};

/// `dtype`: to which floating point tensors are converted.
HfLayout make_hf_layout(
    const Catalog& catalog,
    const NameRules& rename,
    int64_t max_file_bytes,
    std::optional<at::ScalarType> dtype);

/// Writes model.safetensors.index.json, unless there is only one file.
void write_hf_index(const HfLayout& layout, const Path& folder);

} // namespace fsdp::detail
