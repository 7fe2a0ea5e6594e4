#include "checkpoint/catalog.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <regex>
#include <set>

#include "base/check.h"
#include "base/text.h"
#include "checkpoint/dcp.h"
#include "checkpoint/json_text.h"
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"

namespace fsdp::detail {

namespace {

/// Returns the offsets, in the whole tensors, of the pieces in a file of torch's distributed
/// checkpoint, by name. Empty for a file of whole tensors.
std::map<std::string, std::vector<int64_t>> sharding_info(
    const SafetensorsHeader& header, const std::string& file) {
  std::map<std::string, std::vector<int64_t>> result;
  const auto text = header.metadata.find(kShardingInfo);
  if (text == header.metadata.end()) {
    return result;
  }
  const auto where = file + ", " + kShardingInfo;
  const auto info = parse_json(text->second, where);
  std::map<std::string_view, std::vector<int64_t>> saved;
  for (const auto item : json_members(info.root(), kShardingInfo, file)) {
    saved[item.name()] =
        json_sizes(json_field(item, "saved_offsets", where), "saved_offsets", where);
  }
  for (const auto& entry : header.entries) {
    const auto found = saved.find(entry.name);
    FSDP_CHECK_AS(CheckpointError, found != saved.end(), where, ": '", entry.name, "' is missing");
    auto& offsets = found->second;
    auto sizes = offsets;
    bool fits = offsets.size() == entry.sizes.size();
    for (size_t dim = 0; fits && dim < sizes.size(); ++dim) {
      fits = !__builtin_add_overflow(offsets[dim], entry.sizes[dim], &sizes[dim]);
    }
    FSDP_CHECK_AS(
        CheckpointError, fits && tensor_bytes(sizes, entry.dtype), file, ", tensor '", entry.name,
        "': its saved_offsets do not fit its shape");
    result[entry.name] = std::move(offsets);
  }
  return result;
}

/// Collects the tensors of several files.
class Collector {
 public:
  explicit Collector(Path folder) {
    catalog_.folder = std::move(folder);
  }

  void add_file(const std::string& name) {
    const auto file = File::open(catalog_.folder / name);
    const auto header = read_safetensors(file);
    const auto offsets = sharding_info(header, file.path().string());
    for (const auto& entry : header.entries) {
      StoredPiece piece{name, entry.offset, Box::whole(entry.sizes), {}};
      if (!offsets.empty()) {
        piece.box.offsets = offsets.at(entry.name);
      }
      add(entry, std::move(piece), file.path().string());
    }
    if (const auto found = header.metadata.find(kValuesKey); found != header.metadata.end()) {
      const auto where = file.path().string() + ", " + kValuesKey;
      for (auto& value : parse_values(found->second, where)) {
        catalog_.values.push_back(std::move(value));
      }
    }
  }

  Catalog finish() {
    catalog_.index(catalog_.folder.string());
    return std::move(catalog_);
  }

 private:
  void add(const SafetensorsEntry& entry, StoredPiece piece, const std::string& file) {
    const auto [found, is_new] = index_.emplace(entry.name, catalog_.tensors.size());
    if (is_new) {
      catalog_.tensors.push_back({entry.name, entry.dtype, entry.sizes, {}});
    }
    auto& tensor = catalog_.tensors[found->second];
    FSDP_CHECK_AS(
        CheckpointError, tensor.dtype == entry.dtype && tensor.sizes.size() == entry.sizes.size(),
        file, ", tensor '", entry.name, "': has another dtype or number of dims than in ",
        tensor.pieces.empty() ? file : tensor.pieces[0].file);
    // No file says how large the whole tensor is, so take the ends of its pieces.
    for (size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
      tensor.sizes[dim] =
          std::max(tensor.sizes[dim], piece.box.offsets[dim] + piece.box.sizes[dim]);
    }
    FSDP_CHECK_AS(
        CheckpointError, tensor_bytes(tensor.sizes, tensor.dtype), file, ", tensor '", entry.name,
        "': its pieces make more elements than can be counted");
    tensor.pieces.push_back(std::move(piece));
  }

  Catalog catalog_;
  std::map<std::string, size_t> index_; // of each tensor in the catalog
};

Catalog open_indexed(const Path& folder) {
  const auto file = (folder / kHfIndexName).string();
  const auto index = parse_json(read_text(file), file);
  const auto map = json_field(index.root(), "weight_map", file);
  std::map<std::string, std::string> files; // by tensor
  std::map<std::string, size_t> names;      // number of tensors by file
  for (const auto item : json_members(map, "weight_map", file)) {
    const auto& where = json_file_name(item, item.name().c_str(), file);
    files[item.name()] = where;
    ++names[where];
  }
  Collector collector(folder);
  for (const auto& [name, count] : names) {
    collector.add_file(name);
  }
  auto catalog = collector.finish();
  for (const auto& [name, where] : files) {
    const auto* tensor = catalog.find_tensor(name);
    const bool there = tensor && std::any_of(
                                     tensor->pieces.begin(), tensor->pieces.end(),
                                     [&](const auto& piece) { return piece.file == where; });
    FSDP_CHECK_AS(
        CheckpointError, there, file, ": tensor '", name, "' is not in ", where,
        ", where it has to be");
  }
  return catalog;
}

/// Throws CheckpointError if the sorted `names` show that files are missing. Without a manifest or
/// an index nothing else shows it.
void check_names(const Path& folder, const std::vector<std::string>& names) {
  static const std::regex ours(R"(rank_\d{5,}(\.\d+)?\.safetensors)");
  static const std::regex numbered(R"(model-\d{5}-of-(\d{5})\.safetensors)");
  std::set<int> counts;
  for (const auto& name : names) {
    FSDP_CHECK_AS(
        CheckpointError, !std::regex_match(name, ours), folder.string(),
        " is incomplete: ", kManifestName, " is missing");
    std::smatch match;
    if (std::regex_match(name, match, numbered)) {
      counts.insert(std::stoi(match[1]));
    }
  }
  for (const auto count : counts) {
    for (int i = 1; i <= count; ++i) {
      char name[64];
      std::snprintf(name, sizeof(name), "model-%05d-of-%05d.safetensors", i, count);
      FSDP_CHECK_AS(
          CheckpointError, std::binary_search(names.begin(), names.end(), std::string(name)),
          folder.string(), " is incomplete: ", name, " is missing");
    }
  }
}

Catalog open_safetensors(const Path& folder) {
  Collector collector(folder);
  const auto all = list_folder(folder);
  check_names(folder, all);
  for (const auto& name : all) {
    if (name.ends_with(".safetensors")) {
      collector.add_file(name);
    }
  }
  return collector.finish();
}

Catalog open_folder(const Path& folder) {
  Catalog catalog;
  switch (kind_of(folder)) {
    case FolderKind::manifest:
      catalog = read_manifest(folder / kManifestName);
      catalog.folder = folder;
      return catalog;
    case FolderKind::hf_index:
      return open_indexed(folder);
    case FolderKind::dcp:
      catalog = read_dcp(folder);
      read_dcp_values(catalog);
      return catalog;
    case FolderKind::safetensors:
      return open_safetensors(folder);
    case FolderKind::none:
      break;
  }
  FSDP_THROW(
      CheckpointError, folder.string(), " holds no checkpoint: neither ", kManifestName, " nor ",
      kDcpMetadataName, " nor a safetensors file is in it");
}

void check_files(const Catalog& catalog) {
  for (const auto& [name, bytes] : catalog.least_bytes) {
    check_fits(File::open(catalog.folder / name), bytes);
  }
  std::map<std::string, int64_t> file_bytes;
  for (const auto& tensor : catalog.tensors) {
    for (const auto& piece : tensor.pieces) {
      const auto [found, is_new] = file_bytes.try_emplace(piece.file);
      if (is_new) {
        found->second = File::open(catalog.folder / piece.file).size();
      }
      check_fits(catalog.folder / piece.file, found->second, tensor, piece);
    }
  }
}

} // namespace

const StoredTensor* Catalog::find_tensor(const std::string& name) const {
  const auto found = tensor_index_.find(name);
  return found == tensor_index_.end() ? nullptr : &tensors[found->second];
}

const StoredValue* Catalog::find_value(const std::string& name) const {
  const auto found = value_index_.find(name);
  return found == value_index_.end() ? nullptr : &values[found->second].second;
}

void Catalog::index(const std::string& where) {
  tensor_index_.clear();
  value_index_.clear();
  for (size_t i = 0; i < tensors.size(); ++i) {
    FSDP_CHECK_AS(
        CheckpointError, tensor_index_.emplace(tensors[i].name, i).second, where, ": the tensor '",
        tensors[i].name, "' occurs twice");
  }
  for (size_t i = 0; i < values.size(); ++i) {
    FSDP_CHECK_AS(
        CheckpointError,
        !tensor_index_.contains(values[i].first) && value_index_.emplace(values[i].first, i).second,
        where, ": the name '", values[i].first, "' occurs twice");
  }
}

FolderKind kind_of(const Path& folder) {
  if (path_exists(folder / kManifestName)) {
    return FolderKind::manifest;
  }
  if (path_exists(folder / kHfIndexName)) {
    return FolderKind::hf_index;
  }
  if (path_exists(folder / kDcpMetadataName)) {
    return FolderKind::dcp;
  }
  const auto names = list_folder(folder);
  const auto any = [&](const char* suffix) {
    return std::any_of(
        names.begin(), names.end(), [&](const auto& name) { return name.ends_with(suffix); });
  };
  if (any(".safetensors")) {
    return FolderKind::safetensors;
  }
  return any(kDcpSuffix) ? FolderKind::dcp : FolderKind::none; // one that is incomplete
}

void check_fits(const File& file, int64_t least_bytes) {
  const auto file_bytes = file.size();
  FSDP_CHECK_AS(
      CheckpointError, file_bytes >= least_bytes, file.path().string(), " has ", file_bytes,
      " bytes, but needs ", least_bytes, ": the file is truncated");
}

void check_fits(
    const Path& file, int64_t file_bytes, const StoredTensor& tensor, const StoredPiece& piece) {
  const auto bytes =
      piece.archive_bytes > 0 ? piece.archive_bytes : *tensor_bytes(piece.box.sizes, tensor.dtype);
  FSDP_CHECK_AS(
      CheckpointError, piece.offset <= file_bytes && bytes <= file_bytes - piece.offset,
      file.string(), ", tensor '", tensor.name, "': the file has ", file_bytes,
      " bytes, the tensor needs ", bytes, " from byte ", piece.offset,
      " on: the file is truncated");
}

void check_coverage(const Catalog& catalog, const StoredTensor& tensor) {
  std::vector<Box> boxes;
  std::vector<std::string> files;
  for (const auto& piece : tensor.pieces) {
    boxes.push_back(piece.box);
    files.push_back(piece.file);
  }
  FSDP_CHECK_AS(
      CheckpointError, tile(boxes, tensor.sizes), catalog.folder.string(), ", tensor '",
      tensor.name, "': its pieces (in ", files.empty() ? "no file" : join(files),
      ") overlap, or do not make the whole: a file is missing or is from another checkpoint");
}

void check_coverage(const Catalog& catalog) {
  for (const auto& tensor : catalog.tensors) {
    check_coverage(catalog, tensor);
  }
}

Catalog open_catalog(const Path& path) {
  FSDP_CHECK_AS(CheckpointError, path_exists(path), path.string(), ": there is no such checkpoint");
  Catalog catalog;
  auto opened = std::make_shared<const Folder>(is_folder(path) ? path : path.parent_path());
  if (is_folder(path)) {
    catalog = open_folder(path);
  } else {
    Collector collector(path.parent_path());
    collector.add_file(path.filename().string());
    catalog = collector.finish();
  }
  catalog.opened = std::move(opened);
  check_coverage(catalog);
  check_files(catalog);
  catalog.opened->check_not_replaced();
  return catalog;
}

} // namespace fsdp::detail
