#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <fsdp/checkpoint.h>

#include "checkpoint/plan.h"
#include "checkpoint/publication.h"
#include "checkpoint/safetensors.h"

namespace fsdp::detail {

/// A save that all ranks have agreed on. What is left to do needs no collectives,
/// and may be done in any thread.
struct SaveJob {
  Publication publication;
  SavePlan plan;
  std::string error = {}; // why this rank cannot write: the save fails with it
  bool is_direct = false; // past the page cache
};

/// What rank 0 does for a series; each may be empty.
struct SeriesSteps {
  /// What the names of the series begin with: what dead saves left of any of them goes.
  std::string leftovers = {};
  /// The time of the newest that is there.
  std::function<int64_t()> newest_time = {};
  /// When the checkpoint is in place.
  std::function<void()> after = {};
};

/// Waits for this rank's save that is under way, draws the id on rank 0 and plans.
/// Collective over the world; throws on all ranks if it does on one, or if the save
/// before has failed, and nothing is left then.
SaveJob begin_save(
    const StateDict& state,
    const Path& path,
    const SaveOptions& options,
    const std::string& leftovers = {});

/// Writes this rank's files, waits for the others, and completes the checkpoint.
void run_save(const SaveJob& job, const SeriesSteps& steps = {});

/// The bytes of a part in host memory, without gaps: its own where it is so already.
at::Tensor host_bytes(const at::Tensor& data);

/// Returns a checksum of each block, made while it is in the cache.
std::vector<uint32_t> append_blocks(FileWriter& file, const at::Tensor& data);
/// Tells torch's distributed checkpoint too where in the whole tensors the entries lie.
SafetensorsHeader shard_header(
    std::vector<SafetensorsEntry> entries,
    const std::map<std::string, std::vector<int64_t>>& offsets,
    const std::string& file);
/// Writes the manifest, with a time later than `newest_time`: clocks differ.
void complete(Catalog catalog, const Publication& publication, int64_t newest_time = 0);

/// The catalog of all ranks' parts; throws unless these make every tensor of `plan`.
Catalog merge_catalogs(
    const SavePlan& plan, const std::vector<std::string>& texts, const Path& folder);

// One save at a time per rank; in async_save.cpp.

void save(
    const StateDict& state, const Path& path, const SaveOptions& options, const SeriesSteps& steps);
std::future<void> async_save(
    const StateDict& state, const Path& path, const SaveOptions& options, const SeriesSteps& steps);

/// Waits for this rank's save that is under way, and throws what it threw, once.
/// For begin_save, which lets all ranks know.
void finish_previous_save();

} // namespace fsdp::detail
