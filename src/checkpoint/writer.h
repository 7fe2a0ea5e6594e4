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
};

/// Draws the id on rank 0 and plans. Collective over the world; throws on all ranks
/// if it does on one, and nothing is left then.
SaveJob begin_save(const StateDict& state, const Path& path, const SaveOptions& options);

/// Writes this rank's files, waits for the others, and completes the checkpoint.
/// `after`: on rank 0, when it is in place.
void run_save(const SaveJob& job, const std::function<void()>& after = {});

/// The bytes of a part in host memory, without gaps: its own where it is so already.
at::Tensor host_bytes(const at::Tensor& data);

/// Writes them at `offset`; returns a checksum of each block, made while it is in
/// the cache.
std::vector<uint32_t> write_blocks(const File& file, int64_t offset, const at::Tensor& data);
/// Tells torch's distributed checkpoint too where in the whole tensors the entries lie.
SafetensorsHeader shard_header(
    std::vector<SafetensorsEntry> entries,
    const std::map<std::string, std::vector<int64_t>>& offsets,
    const std::string& file);
/// Writes the manifest.
void complete(Catalog catalog, const Publication& publication);

/// The catalog of all ranks' parts; throws unless these make every tensor of `plan`.
Catalog merge_catalogs(
    const SavePlan& plan, const std::vector<std::string>& texts, const Path& folder);

// One save at a time per rank; in async_save.cpp.

/// save and async_save, and what rank 0 does when the checkpoint is in place.
void save(
    const StateDict& state,
    const Path& path,
    const SaveOptions& options,
    const std::function<void()>& after);
std::future<void> async_save(
    const StateDict& state,
    const Path& path,
    const SaveOptions& options,
    const std::function<void()>& after);

/// Waits for this rank's save that is under way, and throws what it threw.
void finish_previous_save();

} // namespace fsdp::detail
