#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/box.h"
#include "checkpoint/files.h"

namespace fsdp::detail {

/// A part of a tensor that lies in one file, row-major without gaps.
struct StoredPiece {
  std::string file; // in the checkpoint's folder
  int64_t offset = 0;
  Box box;
  std::vector<uint32_t> crcs; // CRC32C of each `kBlockBytes`; or none
};

struct StoredTensor {
  std::string name;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes;
  std::vector<StoredPiece> pieces;
};

using StoredValue = std::variant<bool, int64_t, double, std::string>;

/// Bytes under one checksum: reading any of them means reading all.
inline constexpr int64_t kBlockBytes = int64_t{4} << 20;

/// What a checkpoint holds, whoever wrote it.
struct Catalog {
  Path folder;
  std::shared_ptr<const Folder> opened; // the one that was there then
  std::string id;                       // of the save; empty for files of others
  int64_t time = 0;                     // when it was saved, in nanoseconds since 1970; 0: unknown
  std::vector<StoredTensor> tensors;
  std::vector<std::pair<std::string, StoredValue>> values;

  /// Null where there is none.
  const StoredTensor* find_tensor(const std::string& name) const;
  const StoredValue* find_value(const std::string& name) const;

  /// Makes the names findable; throws where one is there twice.
  void index();

 private:
  std::unordered_map<std::string, size_t> tensor_index_;
  std::unordered_map<std::string, size_t> value_index_;
};

/// From a folder with our manifest.json, a Hugging Face folder with an index, a
/// folder of safetensors files (of whole tensors, or as torch's distributed
/// checkpoint shards them), or one such file. Checks that each tensor is there
/// exactly once, in files that are long enough; reads no tensor.
Catalog open_catalog(const Path& path);

/// Throws CheckpointError unless each tensor's pieces are all of it, once.
void check_coverage(const Catalog& catalog);
void check_coverage(const Catalog& catalog, const StoredTensor& tensor);

} // namespace fsdp::detail
