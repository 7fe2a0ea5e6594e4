#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/files.h"
#include "layout/box.h"

namespace fsdp::detail {

/// A part of a tensor that lies in one file, row-major without gaps.
struct StoredPiece {
  std::string file; // relative to the checkpoint's folder
  int64_t offset = 0;
  Box box;
  std::vector<uint32_t> crcs; // CRC32C of each `kBlockBytes`; empty if unknown
  /// If this is not 0, so many bytes at `offset` are an archive that holds the part, see
  /// open_dcp_piece.
  int64_t archive_bytes = 0;
};

struct StoredTensor {
  std::string name;
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes;
  std::vector<StoredPiece> pieces;
};

using StoredValue = std::variant<bool, int64_t, double, std::string>;
using StoredValues = std::vector<std::pair<std::string, StoredValue>>;

/// Something of a Python program that is neither a tensor nor made of values.
struct StoredObject {
  std::string name;
  std::string type; // "list" for example; empty if unknown
  std::string file;
  int64_t offset = 0;
  int64_t bytes = 0;
};

/// A safetensors file has a checkpoint's values in its metadata, under this key.
inline constexpr const char* kValuesKey = "fsdp.values";
/// Under this key, torch's distributed checkpoint says where in the whole tensors those of the file
/// lie.
inline constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";

/// The index of a Hugging Face folder: the file of each tensor.
inline constexpr const char* kHfIndexName = "model.safetensors.index.json";

/// The number of bytes under one checksum. To check one of these bytes, all of them must be read.
inline constexpr int64_t kBlockBytes = int64_t{4} << 20;

/// The contents of a checkpoint that this library or another program wrote.
struct Catalog {
  Path folder;
  std::shared_ptr<const Folder> opened; // the folder that was at this path at first
  std::string id;                       // of the save; empty without a manifest.json
  int64_t time = 0;                     // of the save, in nanoseconds since 1970; 0 if unknown
  std::vector<StoredTensor> tensors;
  StoredValues values;
  std::vector<StoredObject> objects; // are not loaded or converted
  /// How many bytes a file needs, if the checkpoint says more than its pieces do.
  std::map<std::string, int64_t> least_bytes;

  /// Return null if there is none.
  const StoredTensor* find_tensor(const std::string& name) const;
  const StoredValue* find_value(const std::string& name) const;

  /// Builds the index that the find functions use. Throws CheckpointError, which begins with
  /// `where`, if a name occurs twice.
  void index(const std::string& where);

 private:
  // Not hashed: a hostile file could choose names with the same hash.
  std::map<std::string, size_t> tensor_index_;
  std::map<std::string, size_t> value_index_;
};

/// What kind of checkpoint a folder holds.
enum class FolderKind {
  none,
  manifest,   // ours
  hf_index,   // a Hugging Face folder with an index
  dcp,        // of torch.distributed.checkpoint, see dcp.h
  safetensors // other safetensors files
};
FolderKind kind_of(const Path& folder);

/// Opens a folder with our manifest.json, a Hugging Face folder with an index, a folder
/// that torch's distributed checkpoint wrote, a folder of safetensors files (of whole tensors, or
/// of shards), or a single safetensors file. Throws CheckpointError if elements of a tensor are
/// missing or stored twice, or if a file is too short. Reads no tensor data.
Catalog open_catalog(const Path& path);

/// Returns the checkpoint that a user means by `path`: a checkpoint, or the folder of a series or
/// of a run, which stands for its latest checkpoint. Throws CheckpointError if there is none.
Path find_checkpoint(const Path& path);

/// Throws CheckpointError if a file of `file_bytes` ends before the piece does.
void check_fits(const File& file, int64_t least_bytes);
void check_fits(
    const Path& file, int64_t file_bytes, const StoredTensor& tensor, const StoredPiece& piece);

/// Throw CheckpointError unless the pieces of a tensor hold each of its elements exactly once.
void check_coverage(const Catalog& catalog);
void check_coverage(const Catalog& catalog, const StoredTensor& tensor);

} // namespace fsdp::detail
