#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <fsdp/checkpoint.h>
#include <fsdp/export.h>

namespace fsdp {

// Tools for checkpoint files. They need neither a model nor a process group. `path` is anything
// that `load` takes, or the folder of a CheckpointSeries, which stands for its latest checkpoint.
// The run folder of `fsdp train` stands for the series in its folder "checkpoints".

/// A part of a tensor that lies in one file.
struct CheckpointPiece {
  std::string file; // relative to the checkpoint's folder
  /// Of the piece's first byte in the file. If `is_dcp`, of the first byte of the archive with the
  /// piece in it.
  int64_t offset = 0;
  std::vector<int64_t> offsets; // of the piece's first element in the whole tensor
  std::vector<int64_t> sizes;
  std::vector<uint32_t> checksums; // CRC32C of each 4 MiB; empty without a manifest.json
};

struct CheckpointTensor {
  std::string name;
  std::string dtype; // as written in the file, "BF16" for example
  std::vector<int64_t> shape;
  int64_t bytes = 0;
  std::vector<CheckpointPiece> pieces;
};

/// Something in a checkpoint of torch.distributed.checkpoint that is no tensor, number, flag or
/// string. Only Python can read it.
struct CheckpointObject {
  std::string name;
  std::string type; // of Python, "list" for example; empty if unknown
  int64_t bytes = 0;
};

struct CheckpointContents {
  std::filesystem::path path; // for a series, the checkpoint that was chosen
  bool is_ours = false;       // has a manifest.json
  bool is_dcp = false;        // was written by Python's torch.distributed.checkpoint
  int64_t time = 0;           // of the save, in nanoseconds since 1970; 0 if unknown
  std::vector<CheckpointTensor> tensors;
  std::vector<std::pair<std::string, std::variant<bool, int64_t, double, std::string>>> values;
  std::vector<CheckpointObject> objects;
};

/// Returns what a checkpoint contains, without reading tensor data. Throws CheckpointError if the
/// checkpoint is not complete.
FSDP_API CheckpointContents inspect_checkpoint(const std::filesystem::path& path);

struct CheckpointReport {
  std::filesystem::path path;
  int64_t num_files = 0;
  int64_t num_tensors = 0;
  int64_t bytes = 0;                 // of tensor data that was read
  int64_t unchecked_bytes = 0;       // of these, bytes without a checksum
  std::vector<std::string> problems; // each names the file and the tensor
};

/// Reads the whole checkpoint and compares it with its checksums. Continues after a problem and
/// lists all of them. Throws CheckpointError if there is no checkpoint at `path`, or if it is
/// replaced meanwhile.
FSDP_API CheckpointReport verify_checkpoint(const std::filesystem::path& path);

struct ConvertOptions {
  enum class Format { full, sharded };
  /// `full` writes whole tensors as save_hf does; `sharded` writes what save does.
  Format format = Format::full;
  /// For `sharded`: for how many ranks to write. Each rank's file holds its part of each tensor
  /// along dim 0.
  int num_ranks = 1;
  int64_t max_file_bytes = int64_t{5} << 30; // for `full`; see SaveHfOptions
  std::vector<NameRule> names = {};          // map names in the input to names in the output
  /// Convert only tensors and values whose whole name in the input matches this regular
  /// expression.
  std::optional<std::string> only = {};
  std::optional<at::ScalarType> dtype = {}; // to which floating point tensors are converted
  bool overwrite = false;
  /// For `full`: called with each tensor and its name in the input. What it returns is written, and
  /// must have the same shape.
  std::function<at::Tensor(const std::string& name, const at::Tensor& tensor)> change = {};
};

struct ConvertReport {
  int64_t num_files = 0;
  int64_t num_tensors = 0;
  int64_t bytes = 0;
  std::filesystem::path input;            // for a series or a run, the checkpoint that was chosen
  std::vector<std::string> left_out = {}; // names of objects that only Python can read
};

/// Rewrites a checkpoint in another form, one tensor at a time. Compares checksums if the input
/// has them. `output` appears complete or not at all. Throws CheckpointError if `output` is the
/// folder of the input and would lose tensors or values.
FSDP_API ConvertReport convert_checkpoint(
    const std::filesystem::path& input,
    const std::filesystem::path& output,
    const ConvertOptions& options = {});

} // namespace fsdp
