#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include <fsdp/checkpoint.h>

#include "checkpoint/plan.h"
#include "checkpoint/publication.h"
#include "checkpoint/safetensors.h"

namespace fsdp::detail {

/// A save that all ranks have agreed on. The rest of the save needs no collectives, so any thread
/// may do it.
struct SaveJob {
  Publication publication;
  SavePlan plan;
  std::string error = {}; // why this rank cannot write, if it cannot; the save fails then
  bool is_direct = false; // bypass the page cache
};

/// The steps of rank 0 if the checkpoint belongs to a series. Each member may be empty.
struct SeriesSteps {
  /// All names in the series begin with this. Folders that dead saves left under such names are
  /// removed.
  std::string leftovers = {};
  /// Returns the time of the newest checkpoint in the series.
  std::function<int64_t()> newest_time = {};
  /// Called when TARGET is the new checkpoint.
  std::function<void()> after = {};
};

/// Waits for this rank's previous save, makes the new save's id on rank 0, and plans the save. If
/// this fails on one rank, or if the previous save has failed, the save throws on all ranks, here
/// or in run_save, and leaves no files. Collective over the world.
SaveJob begin_save(
    const StateDict& state,
    const Path& path,
    const SaveOptions& options,
    const std::string& leftovers = {});

/// Writes this rank's files and waits for the other ranks. Rank 0 completes the checkpoint.
void run_save(const SaveJob& job, const SeriesSteps& steps = {});

/// Returns the data contiguous in host memory. Shares memory with `data` if that is so already.
at::Tensor host_bytes(const at::Tensor& data);

/// The pieces of each tensor that were written, by the tensor's name.
using Pieces = std::map<std::string, std::vector<StoredPiece>>;
/// Describes what this rank has written for rank 0, as JSON in the form of the manifest.
std::string rank_text(const SavePlan& plan, Pieces pieces, int rank);

/// Appends the tensor to the file. Returns the checksum of each block, which is computed while the
/// block is in the processor's cache.
std::vector<uint32_t> append_blocks(FileWriter& file, const at::Tensor& data);
/// Makes a header that also tells torch's distributed checkpoint where in the whole tensors the
/// entries lie.
SafetensorsHeader shard_header(
    std::vector<SafetensorsEntry> entries,
    const std::map<std::string, std::vector<int64_t>>& offsets,
    const std::string& file);
/// Writes the manifest. Its time is later than `newest_time`, even if the clock is behind.
void complete(Catalog catalog, const Publication& publication, int64_t newest_time = 0);

/// Merges the ranks' descriptions of their files into one catalog. Throws CheckpointError unless
/// they hold every element of every tensor in `plan` exactly once.
Catalog merge_catalogs(
    const SavePlan& plan, const std::vector<std::string>& texts, const Path& folder);

// A rank has at most one save under way.

void save(
    const StateDict& state, const Path& path, const SaveOptions& options, const SeriesSteps& steps);
std::future<void> async_save(
    const StateDict& state, const Path& path, const SaveOptions& options, const SeriesSteps& steps);

/// Waits for this rank's save in the background. If it failed, throws its error, once. The caller
/// tells the other ranks.
void finish_previous_save();

} // namespace fsdp::detail
