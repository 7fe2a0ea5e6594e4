#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <fsdp/checkpoint.h>
#include <fsdp/export.h>

namespace fsdp {

// Checkpoints as files, without a model and without ranks. `path` is anything that
// `load` takes, or the folder of a CheckpointSeries, which means its latest one.

/// A part of a tensor, in one file.
struct CheckpointPiece {
  std::string file;             // in the checkpoint's folder
  int64_t offset = 0;           // of its first byte
  std::vector<int64_t> offsets; // of its first element in the whole tensor
  std::vector<int64_t> sizes;
  std::vector<uint32_t> checksums; // CRC32C of each 4 MiB; none in files of others
};

struct CheckpointTensor {
  std::string name;
  std::string dtype; // as in the files: "BF16"
  std::vector<int64_t> shape;
  int64_t bytes = 0;
  std::vector<CheckpointPiece> pieces;
};

struct CheckpointContents {
  std::filesystem::path path; // of a series: the one that was taken
  bool is_ours = false;       // with a manifest; else safetensors files of others
  int64_t time = 0;           // when it was saved, in nanoseconds since 1970; 0: unknown
  std::vector<CheckpointTensor> tensors;
  std::vector<std::pair<std::string, std::variant<bool, int64_t, double, std::string>>> values;
};

/// Reads no tensor. Throws CheckpointError where the checkpoint is not complete.
FSDP_API CheckpointContents inspect_checkpoint(const std::filesystem::path& path);

struct CheckpointReport {
  std::filesystem::path path;
  int64_t num_files = 0;
  int64_t num_tensors = 0;
  int64_t bytes = 0;                 // of tensors that were read
  int64_t unchecked_bytes = 0;       // those of them that have no checksum
  std::vector<std::string> problems; // each names file and tensor
};

/// Reads everything, and goes on after what is wrong. Throws CheckpointError only
/// where there is no checkpoint.
FSDP_API CheckpointReport verify_checkpoint(const std::filesystem::path& path);

struct ConvertOptions {
  enum class Format { full, sharded };
  /// As save_hf writes it, or as save does.
  Format format = Format::full;
  /// Sharded: files, each with its part of each tensor along dim 0, as that many
  /// ranks would write.
  int num_ranks = 1;
  int64_t max_file_bytes = int64_t{5} << 30; // full
  std::vector<NameRule> names = {};          // from those in the input
  /// Only tensors and values whose name in the input is all matched by this regular
  /// expression.
  std::optional<std::string> only = {};
  std::optional<at::ScalarType> dtype = {}; // of floating-point tensors
  bool overwrite = false;
};

struct ConvertReport {
  int64_t num_files = 0;
  int64_t num_tensors = 0;
  int64_t bytes = 0;
  int64_t values_left_out = 0; // a full model has no place for them
};

/// One tensor at a time, with checksums compared where there are some. `output`
/// appears complete or not at all.
FSDP_API ConvertReport convert_checkpoint(
    const std::filesystem::path& input,
    const std::filesystem::path& output,
    const ConvertOptions& options = {});

} // namespace fsdp
