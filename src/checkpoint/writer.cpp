#include "checkpoint/writer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>

#include <fsdp/distributed.h>

#include "base/check.h"
#include "base/text.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/json_text.h"
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "process_group/exchange.h"

namespace fsdp::detail {

namespace {

using nlohmann::json;

/// A rank's message to the others when a save begins.
struct HelloMessage {
  std::string error; // why this rank cannot take part; else empty
  std::string path;
  std::string id; // set on rank 0 only
  std::string checksum;
  std::string mesh_indices;
};

std::vector<HelloMessage> exchange_hello_messages(const HelloMessage& mine) {
  const json text{mine.error, mine.path, mine.id, mine.checksum, mine.mesh_indices};
  std::vector<HelloMessage> all;
  for (const auto& theirs :
       gather_texts(text.dump(-1, ' ', false, json::error_handler_t::replace))) {
    const auto fields = json::parse(theirs).get<std::vector<std::string>>();
    all.push_back({fields[0], fields[1], fields[2], fields[3], fields[4]});
  }
  return all;
}

void check_hello_messages(const std::vector<HelloMessage>& all) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto& error = all[rank].error;
    FSDP_CHECK_AS(
        CheckpointError, error.empty(),
        error.starts_with("rank ") ? "" : c10::str("rank ", rank, ": "), error);
    FSDP_CHECK_AS(
        CheckpointError, all[rank].path == all[0].path, "[save] rank 0 saves ", all[0].path,
        ", rank ", rank, " saves ", all[rank].path);
  }
}

/// Writes one safetensors file, and adds its pieces to `written`.
void write_file(
    const Path& path,
    bool is_direct,
    const std::map<std::string, const Part*>& parts,
    Pieces& written) {
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::vector<int64_t>> offsets;
  for (const auto& [name, part] : parts) {
    entries.push_back({name, part->data.scalar_type(), part->box.sizes});
    offsets[name] = part->box.offsets;
  }
  auto header = shard_header(std::move(entries), offsets, path.string());
  const auto start = layout_safetensors(header, path.string());
  FileWriter file(path, is_direct);
  file.append(start.data(), static_cast<int64_t>(start.size()));
  for (const auto& entry : header.entries) {
    const auto& part = *parts.at(entry.name);
    written[entry.name].push_back(
        {path.filename().string(), entry.offset, part.box, append_blocks(file, part.data)});
  }
  file.finish();
}

/// Writes this rank's files. A name can occur only once in a file, so the second box of a tensor
/// goes to a second file.
Pieces write_parts(const SaveJob& job) {
  std::vector<std::map<std::string, const Part*>> files;
  std::map<std::string, size_t> boxes; // so far, by tensor
  for (const auto& part : job.plan.parts) {
    const auto i = boxes[part.name]++;
    files.resize(std::max(files.size(), i + 1));
    files[i][part.name] = &part;
  }
  Pieces written;
  for (size_t i = 0; i < files.size(); ++i) {
    const auto name = rank_name(job.publication.ranks.rank) + (i > 0 ? c10::str(".", i) : "");
    const auto path = job.publication.data() / (name + ".safetensors");
    write_file(path, job.is_direct, files[i], written);
  }
  return written;
}

} // namespace

std::string rank_text(const SavePlan& plan, Pieces pieces, int rank) {
  Catalog catalog;
  for (auto& [name, of_tensor] : pieces) {
    catalog.tensors.push_back(*plan.catalog.find_tensor(name));
    catalog.tensors.back().pieces = std::move(of_tensor);
  }
  catalog.values = plan.catalog.values;
  return manifest_text(catalog, rank_name(rank) + ".json");
}

at::Tensor host_bytes(const at::Tensor& data) {
  return data.detach().cpu().resolve_conj().resolve_neg().contiguous();
}

std::vector<uint32_t> append_blocks(FileWriter& file, const at::Tensor& data) {
  const auto host = host_bytes(data);
  const auto* bytes = static_cast<const char*>(host.const_data_ptr());
  const auto size = static_cast<int64_t>(host.nbytes());
  std::vector<uint32_t> crcs;
  for (int64_t done = 0; done < size; done += kBlockBytes) {
    const auto block = std::min(kBlockBytes, size - done);
    crcs.push_back(crc32c(bytes + done, static_cast<size_t>(block)));
    file.append(bytes + done, block);
  }
  return crcs;
}

SafetensorsHeader shard_header(
    std::vector<SafetensorsEntry> entries,
    const std::map<std::string, std::vector<int64_t>>& offsets,
    const std::string& file) {
  std::string info;
  for (const auto& [name, offset] : offsets) {
    info += (info.empty() ? "{" : ",") + json_text(name, file) + ":{\"saved_offsets\":[" +
            join(offset, ",") + "]}";
  }
  info += info.empty() ? "{}" : "}";
  return {
      std::move(entries),
      {{kShardingInfo, std::move(info)}, {"DCP_VERSION", "1.0"}, {"format", "pt"}}};
}

SaveJob begin_save(
    const StateDict& state,
    const Path& path,
    const SaveOptions& options,
    const std::string& leftovers) {
  const auto world = current_world();
  SaveJob job;
  auto& publication = job.publication;
  publication.overwrite = options.overwrite;
  publication.leftovers = leftovers;
  publication.ranks = {
      .rank = world.rank,
      .size = world.size,
      .store = world_store(),
      .timeout = options.timeout,
      .is_gone = watch_ranks()};
  // An error that only this rank finds has to reach the others.
  PlanRequest request;
  HelloMessage mine;
  try {
    FSDP_CHECK_AS(
        CheckpointError, world.size == 1 || publication.ranks.store, "[save] the backend of ",
        world.size, " ranks has no store through which they could report to rank 0");
    finish_previous_save();
    publication.target = clean_path(path);
    request = make_request(state);
    if (world.rank == 0) {
      prepare(publication);
    }
    mine = {
        "", publication.target.string(), publication.id, request.checksum(), request.mesh_indices};
  } catch (const std::exception&) {
    mine.error = current_exception_text();
  }
  bool agreed = false;
  try {
    const auto all = exchange_hello_messages(mine);
    check_hello_messages(all);
    publication.id = all[0].id;
    agreed = true;
    std::vector<std::string> mesh_indices;
    bool equal = true;
    for (const auto& hello : all) {
      mesh_indices.push_back(hello.mesh_indices);
      equal = equal && hello.checksum == all[0].checksum;
    }
    const auto lists = equal ? std::vector<std::string>{request.list} : gather_texts(request.list);
    job.plan = make_plan(state, world.rank, lists, mesh_indices);
  } catch (...) {
    if (agreed) { // the other ranks may not have failed, and may be waiting
      give_up(publication, c10::str("rank ", world.rank, ": ", current_exception_text()));
    } else if (publication.lock) {
      discard(publication);
    }
    throw;
  }
  return job;
}

Catalog merge_catalogs(
    const SavePlan& plan, const std::vector<std::string>& texts, const Path& folder) {
  Catalog merged;
  merged.folder = folder;
  std::map<std::string, size_t> index;
  for (const auto& tensor : plan.catalog.tensors) { // in the order of the state dict
    index[tensor.name] = merged.tensors.size();
    merged.tensors.push_back(tensor);
  }
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    auto part = parse_manifest(texts[rank], rank_name(static_cast<int>(rank)) + ".json");
    for (auto& tensor : part.tensors) {
      auto& pieces = merged.tensors[index.at(tensor.name)].pieces;
      std::move(tensor.pieces.begin(), tensor.pieces.end(), std::back_inserter(pieces));
    }
    std::move(part.values.begin(), part.values.end(), std::back_inserter(merged.values));
  }
  merged.index(merged.folder.string());
  check_coverage(merged);
  return merged;
}

void complete(Catalog catalog, const Publication& publication, int64_t newest_time) {
  using namespace std::chrono;
  const int64_t now = duration_cast<nanoseconds>(system_clock::now().time_since_epoch()).count();
  const bool has_next = newest_time < std::numeric_limits<int64_t>::max();
  catalog.id = publication.id;
  catalog.time = std::max(now, newest_time + (has_next ? 1 : 0));
  const auto file = publication.data() / kManifestName;
  write_text(file, manifest_text(catalog, file.string()));
}

void run_save(const SaveJob& job, const SeriesSteps& steps) {
  const auto& publication = job.publication;
  publish(
      publication, {.write =
                        [&] {
                          FSDP_CHECK_AS(CheckpointError, job.error.empty(), job.error);
                          return rank_text(job.plan, write_parts(job), publication.ranks.rank);
                        },
                    .finish =
                        [&](const std::vector<std::string>& texts) {
                          complete(
                              merge_catalogs(job.plan, texts, publication.target), publication,
                              steps.newest_time ? steps.newest_time() : 0);
                        },
                    .after = steps.after});
}

void save(
    const StateDict& state,
    const Path& path,
    const SaveOptions& options,
    const SeriesSteps& steps) {
  run_save(begin_save(state, path, options, steps.leftovers), steps);
}

} // namespace fsdp::detail

void fsdp::save(
    const StateDict& state, const std::filesystem::path& path, const SaveOptions& options) {
  detail::save(state, path, options, {});
}
