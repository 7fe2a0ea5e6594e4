#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <future>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fsdp/export.h>
#include <fsdp/state_dict.h>

namespace fsdp {

struct SaveOptions {
  /// Whether to replace a checkpoint that exists at `path`. The old checkpoint stays complete
  /// until the new one is complete.
  bool overwrite = true;
  /// How long a rank waits for the files of the other ranks. It waits one minute for a rank whose
  /// process has died.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// Maps a key of a StateDict to the name of its tensor in the files. `from` is a regular
/// expression that must match the whole key. It has at most 1000 characters and no back-references,
/// so that matching ends soon. `to` is the name, in which $1, $2, ... stand for the
/// groups of `from`. The first rule that matches is used. A key that no rule matches is its own
/// name.
struct NameRule {
  std::string from;
  std::string to;
};

struct LoadOptions {
  /// Whether a key that the checkpoint does not have is an error. If not, its value stays
  /// unchanged. Keys that only the checkpoint has are never an error.
  bool strict = true;
  /// Whether to compare the data with the checksums, if the files have them.
  bool verify = true;
  std::vector<NameRule> names = {}; // map keys to names in the files
};

/// Writes a checkpoint: manifest.json, and one safetensors file per rank with the data that this
/// rank holds. Nothing is gathered, and data that several ranks hold is written once. `path` is a
/// folder that all ranks can see. The checkpoint appears there complete or not at all; if it
/// cannot be written, all ranks throw CheckpointError. An existing folder at `path` must be empty
/// or hold only a checkpoint. The ranks may have different keys. If several ranks have a plain
/// value under the same key, the first rank's value is saved. Collective over the world.
FSDP_API void save(
    const StateDict& state, const std::filesystem::path& path, const SaveOptions& options = {});

/// Like save, but writes in the background: returns when the tensors have been copied to host
/// memory. The future is ready when the checkpoint is complete. Only one save runs at a time: a
/// second call waits for the first one, and throws if the first one failed.
FSDP_API std::future<void> async_save(
    const StateDict& state, const std::filesystem::path& path, const SaveOptions& options = {});

/// Fills the tensors of `state` in place and replaces its other values. The number of ranks, the
/// meshes, the placements and the dtypes may differ from those that were saved. Each rank reads
/// only the bytes that it needs. `path` is what save or save_hf wrote, a folder of Python's
/// torch.distributed.checkpoint, any folder of safetensors files, or a single safetensors file.
/// Nothing changes on any rank until all ranks have read and checked everything. If a file is
/// changed or cannot be read after that, the error says that the tensors are partly loaded. If one
/// rank fails, all throw CheckpointError. Collective over the world.
FSDP_API void load(
    StateDict& state, const std::filesystem::path& path, const LoadOptions& options = {});

struct SaveHfOptions {
  /// A file holds tensors of at most this many bytes in total. A larger tensor gets a file of its
  /// own.
  int64_t max_file_bytes = int64_t{5} << 30;
  std::vector<NameRule> names = {};         // map keys to names in the files
  std::optional<at::ScalarType> dtype = {}; // to which floating point tensors are converted
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};
/// Writes the tensors of `state` as a Hugging Face style folder: whole tensors, in
/// model-00001-of-0000n.safetensors with model.safetensors.index.json, or in a single
/// model.safetensors. Every rank writes its own part of the tensors. Values that are not tensors
/// are left out. An existing folder is replaced if it holds nothing but checkpoint files.
/// Collective over the world.
FSDP_API void save_hf(
    const StateDict& state, const std::filesystem::path& folder, const SaveHfOptions& options = {});

struct CheckpointSeriesOptions {
  /// How many of the newest checkpoints to keep.
  int64_t keep = 3;
  /// Also keep every checkpoint whose step is a multiple of this number. 0 turns this off.
  int64_t keep_every = 0;
};

/// The checkpoints of one run, named by step: ROOT/step_00000100. ROOT/latest is a symbolic link
/// to the newest complete one.
class FSDP_API CheckpointSeries {
 public:
  explicit CheckpointSeries(
      const std::filesystem::path& root, CheckpointSeriesOptions options = {});

  /// Save as fsdp::save and fsdp::async_save do. Afterwards they remove the checkpoints that the
  /// options do not keep.
  void save(int64_t step, const StateDict& state, const SaveOptions& options = {});
  std::future<void> async_save(
      int64_t step, const StateDict& state, const SaveOptions& options = {});

  /// Removes what saves that were killed have left in the folder, if they ran on this machine. The
  /// next save does it, too, but only a minute after they were killed. A run should call this
  /// before it looks for the checkpoint to resume from. Not collective: any rank may call it.
  void remove_leftovers() const;

  /// The checkpoint that was completed last, even if another one has a larger step. Nothing if
  /// there is no complete checkpoint.
  std::optional<std::filesystem::path> latest() const;
  /// All complete checkpoints with their steps, sorted by step.
  std::vector<std::pair<int64_t, std::filesystem::path>> list() const;

 private:
  std::filesystem::path root_;
  CheckpointSeriesOptions options_;
};

} // namespace fsdp
