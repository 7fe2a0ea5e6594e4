#include <ATen/ATen.h>

#include <map>

#include <fsdp/checkpoint.h>

#include "checkpoint/hf_layout.h"
#include "checkpoint/name_rules.h"
#include "checkpoint/writer.h"

namespace fsdp {

namespace {

using detail::Path;

/// Writes the headers, and gives the files their full sizes. Other ranks may write to the files
/// before or after this.
void write_headers(const detail::HfLayout& layout, const Path& folder) {
  for (const auto& item : layout.files) {
    const auto file = detail::File::create(folder / item.name);
    const auto& entries = item.header.entries;
    file.resize(entries.back().offset + entries.back().bytes());
    file.write(0, item.start.data(), static_cast<int64_t>(item.start.size()));
    file.sync();
  }
}

/// Writes this rank's parts, each at its offset in the whole tensor. Returns which parts it has
/// written, so that rank 0 can check that none is missing.
detail::Pieces write_parts(
    const detail::HfLayout& layout,
    const std::vector<detail::Part>& parts,
    const detail::Rename& rename,
    const Path& folder) {
  detail::Pieces pieces;
  std::map<size_t, detail::File> files;
  for (const auto& part : parts) {
    const auto position = layout.positions.at(rename(part.name));
    const auto& item = layout.files[position.file];
    const auto& entry = item.header.entries[position.entry];
    auto found = files.find(position.file);
    if (found == files.end()) {
      found = files.emplace(position.file, detail::File::create(folder / item.name)).first;
    }
    const auto host = detail::host_bytes(part.data.to(entry.dtype));
    const auto* bytes = static_cast<const char*>(host.const_data_ptr());
    const auto element_bytes = static_cast<int64_t>(host.element_size());
    detail::for_each_run(
        part.box, {part.box.offsets, part.box.sizes},
        {std::vector<int64_t>(entry.sizes.size(), 0), entry.sizes},
        [&](const detail::CopyRun& run) {
          found->second.write(
              entry.offset + run.to * element_bytes, bytes + run.from * element_bytes,
              run.length * element_bytes);
        });
    pieces[part.name].push_back({item.name, 0, part.box, {}});
  }
  for (const auto& [number, file] : files) {
    file.sync();
  }
  return pieces;
}

} // namespace

void save_hf(
    const StateDict& state, const std::filesystem::path& folder, const SaveHfOptions& options) {
  TORCH_CHECK_VALUE(
      options.max_file_bytes > 0, "[save_hf] max_file_bytes is ", options.max_file_bytes);
  const auto rename = detail::renaming_by(options.names);
  at::NoGradGuard no_grad;
  StateDict tensors; // the format cannot hold other values
  for (const auto& [key, value] : state) {
    if (detail::local_tensor(value)) {
      tensors.insert(key, value);
    }
  }
  const auto job = detail::begin_save(tensors, folder, {.timeout = options.timeout});
  const auto data = job.publication.data();
  detail::HfLayout layout;
  detail::publish(
      job.publication,
      {.write =
           [&] {
             layout = detail::make_hf_layout(
                 detail::renamed(job.plan.catalog, rename, options.dtype), options.max_file_bytes);
             const int rank = job.publication.ranks.rank;
             if (rank == 0) {
               write_headers(layout, data);
             }
             return detail::rank_text(
                 job.plan, write_parts(layout, job.plan.parts, rename, data), rank);
           },
       .finish =
           [&](const std::vector<std::string>& texts) {
             detail::merge_catalogs(job.plan, texts, job.publication.target);
             detail::write_hf_index(layout, data);
           }});
}

} // namespace fsdp
