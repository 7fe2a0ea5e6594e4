#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/catalog.h"
#include "checkpoint/name_rules.h"
#include "checkpoint/safetensors.h"

namespace fsdp::detail {

/// One of a Hugging Face folder's files, as all ranks compute it.
struct HfFile {
  std::string name;
  SafetensorsHeader header;
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

/// `dtype`: of floating-point tensors.
HfLayout make_hf_layout(
    const Catalog& catalog,
    const NameRules& rename,
    int64_t max_file_bytes,
    std::optional<at::ScalarType> dtype);

/// model.safetensors.index.json, where there are several files.
void write_hf_index(const HfLayout& layout, const Path& folder);

} // namespace fsdp::detail
