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
  /// Replace a checkpoint that is at `path` already: the old one stays complete
  /// until the new one is.
  bool overwrite = true;
  /// How long a rank waits for the files of the others. One whose process has died is
  /// waited for a minute.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// Which tensor of a file a key means: the first rule whose `from` (a regular
/// expression) matches all of the key gives its name in the file, with $1...
struct NameRule {
  std::string from;
  std::string to;
};

struct LoadOptions {
  /// A key that the checkpoint does not have is an error; else it stays as it is.
  /// What the checkpoint has beyond is never one.
  bool strict = true;
  /// Compare checksums, where the files have them.
  bool verify = true;
  std::vector<NameRule> names = {}; // from ours to those in the files
};

/// Writes a checkpoint: one safetensors file per rank, with that rank's own bytes,
/// and manifest.json. No rank gathers anything; what several ranks hold is written
/// once. `path` is a folder that all ranks see, and it appears there complete or
/// not at all; where it fails, CheckpointError on all ranks. What is replaced must
/// be a checkpoint, or empty. The ranks' keys may differ; a value that several have
/// is that of the first. Collective over the world.
FSDP_API void save(
    const StateDict& state, const std::filesystem::path& path, const SaveOptions& options = {});

/// The same beside what follows: returns when the tensors have been copied to host
/// memory. One at a time; waits for the one before, and throws what that one threw.
FSDP_API std::future<void> async_save(
    const StateDict& state, const std::filesystem::path& path, const SaveOptions& options = {});

/// Fills the tensors of `state` in place, on any ranks, meshes and placements and
/// with conversion to their dtypes, and replaces its other values. Each rank reads
/// the bytes that it needs. From what save or save_hf wrote, and from any folder of
/// safetensors files or a single one. Nothing is changed on any rank before all
/// of them have read and checked everything; where a file is changed or cannot be read
/// after that, the error says that the tensors are partly loaded. Collective over the world.
FSDP_API void load(
    StateDict& state, const std::filesystem::path& path, const LoadOptions& options = {});

struct SaveHfOptions {
  /// A file's tensors take no more, unless one alone does.
  int64_t max_file_bytes = int64_t{5} << 30;
  std::vector<NameRule> names = {};         // from ours to those in the files
  std::optional<at::ScalarType> dtype = {}; // of floating-point tensors
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};
/// The tensors of `state` as a Hugging Face style folder: whole tensors in
/// model-00001-of-0000n.safetensors with model.safetensors.index.json, or
/// model.safetensors alone. Every rank writes its own part of them; values that are
/// not tensors are left out. A folder that is there is replaced, but only if it holds
/// nothing else. Collective over the world.
FSDP_API void save_hf(
    const StateDict& state, const std::filesystem::path& folder, const SaveHfOptions& options = {});

struct CheckpointSeriesOptions {
  /// The newest so many are kept.
  int64_t keep = 3;
  /// And every one whose step is a multiple of it; 0: none.
  int64_t keep_every = 0;
};

/// Checkpoints of one run, by step: ROOT/step_00000100, and ROOT/latest, which
/// always names a complete one.
class FSDP_API CheckpointSeries {
 public:
  explicit CheckpointSeries(std::filesystem::path root, CheckpointSeriesOptions options = {});

  /// As fsdp::save and fsdp::async_save; then the ones that are not to be kept go.
  void save(int64_t step, const StateDict& state, const SaveOptions& options = {});
  std::future<void> async_save(
      int64_t step, const StateDict& state, const SaveOptions& options = {});

  /// The newest complete one, by its manifest rather than by its name.
  std::optional<std::filesystem::path> latest() const;
  /// Complete ones, by step.
  std::vector<std::pair<int64_t, std::filesystem::path>> list() const;

 private:
  std::filesystem::path root_;
  CheckpointSeriesOptions options_;
};

} // namespace fsdp
