#include <fsdp/checkpoint_tools.h>

#include "base/check.h"
#include "base/text.h"
#include "checkpoint/catalog.h"
#include "checkpoint/dcp.h"
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"

namespace fsdp {

namespace detail {

namespace {

bool has_files(const Path& folder) {
  return kind_of(folder) != FolderKind::none;
}

/// Returns the checkpoint that ROOT/latest of a series leads to. Empty if there is no such link.
Path latest_link(const Path& root) {
  const auto target = link_target(root / "latest");
  return target.empty() ? Path() : root / target;
}

} // namespace

Path find_checkpoint(const Path& path) {
  FSDP_CHECK_AS(CheckpointError, path_exists(path), path.string(), ": there is no such checkpoint");
  if (!is_folder(path) || has_files(path)) {
    return path;
  }
  // Take the checkpoint that the link names, not the newest complete one: if it is damaged, the
  // user must learn of it.
  if (const auto latest = latest_link(path); !latest.empty()) {
    return latest;
  }
  if (const auto latest = CheckpointSeries(path).latest()) {
    return *latest;
  }
  if (const auto of_run = path / "checkpoints"; is_folder(of_run)) { // of `fsdp train`
    return find_checkpoint(of_run);
  }
  constexpr size_t kMaxNamed = 3;
  std::vector<std::string> below;
  for (const auto& name : list_folder(path)) {
    const auto folder = path / name;
    if (below.size() < kMaxNamed && is_folder(folder) &&
        (has_files(folder) || !latest_link(folder).empty())) {
      below.push_back(folder.string());
    }
  }
  FSDP_THROW(
      CheckpointError, path.string(), " holds no checkpoint: neither ", kManifestName, " nor ",
      kDcpMetadataName, " nor a safetensors file is in it, nor a complete step_... folder",
      below.empty() ? "; give the folder of a run, of a checkpoint or of a run's checkpoints, a "
                      "Hugging Face folder, or a safetensors file"
                    : "; did you mean " + join(below, " or ") + "?");
}

} // namespace detail

CheckpointContents inspect_checkpoint(const std::filesystem::path& path) {
  CheckpointContents contents;
  contents.path = detail::find_checkpoint(path);
  auto catalog = detail::open_catalog(contents.path);
  contents.is_ours = !catalog.id.empty();
  contents.time = catalog.time;
  contents.is_dcp =
      detail::is_folder(contents.path) && detail::kind_of(contents.path) == detail::FolderKind::dcp;
  contents.values = std::move(catalog.values);
  for (auto& object : catalog.objects) {
    contents.objects.push_back({std::move(object.name), std::move(object.type), object.bytes});
  }
  for (auto& stored : catalog.tensors) {
    CheckpointTensor tensor;
    tensor.name = stored.name;
    tensor.dtype = detail::find_dtype_name(stored.dtype).value_or(c10::toString(stored.dtype));
    tensor.shape = stored.sizes;
    tensor.bytes = detail::tensor_bytes(stored.sizes, stored.dtype).value();
    for (auto& piece : stored.pieces) {
      tensor.pieces.push_back(
          {piece.file, piece.offset, piece.box.offsets, piece.box.sizes, std::move(piece.crcs)});
    }
    contents.tensors.push_back(std::move(tensor));
  }
  return contents;
}

} // namespace fsdp
