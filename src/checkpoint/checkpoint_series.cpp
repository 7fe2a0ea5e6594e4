#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string>
#include <vector>

#include <fsdp/checkpoint.h>

#include "base/check.h"
#include "checkpoint/catalog.h"
#include "checkpoint/manifest.h"
#include "checkpoint/writer.h"

namespace fsdp {

namespace {

using detail::Path;

constexpr const char* kPrefix = "step_";
constexpr const char* kLockName = ".lock";

struct Saved {
  int64_t step = 0;
  Path path;
  int64_t time = 0;
};

Path step_path(const Path& root, int64_t step) {
  char name[40];
  std::snprintf(name, sizeof(name), "%s%08lld", kPrefix, static_cast<long long>(step));
  return root / name;
}

/// Returns the step in a checkpoint's name; -1 for other names.
int64_t step_of(const std::string& name) {
  const std::string prefix = kPrefix;
  if (!name.starts_with(prefix) || name.size() == prefix.size() ||
      name.size() > prefix.size() + 18 ||
      name.find_first_not_of("0123456789", prefix.size()) != std::string::npos) {
    return -1;
  }
  return std::stoll(name.substr(prefix.size()));
}

/// Returns the names of all checkpoints that have a manifest, sorted. They may be incomplete.
std::vector<std::string> names_in(const Path& root) {
  auto names = detail::list_folder(root);
  std::erase_if(names, [&](const auto& name) {
    return step_of(name) < 0 || !detail::path_exists(root / name / detail::kManifestName);
  });
  return names;
}

/// Returns the complete checkpoints, the newest first. Sorts by time instead of by step: a run may
/// go back to an earlier step, and then its new checkpoints have smaller steps than old ones.
std::vector<Saved> complete_ones(const Path& root) {
  std::vector<Saved> found;
  for (const auto& name : names_in(root)) {
    try {
      found.push_back({step_of(name), root / name, detail::open_catalog(root / name).time});
    } catch (const CheckpointError&) { // not complete, or being removed
    }
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return a.time != b.time ? a.time > b.time : a.step > b.step;
  });
  return found;
}

/// Makes ROOT/latest a symbolic link to the checkpoint, so that ROOT/latest can be loaded.
void set_latest(const Path& root, const Path& checkpoint) {
  const auto aside = root / "latest.aside";
  detail::remove_tree(aside);
  if (symlink(checkpoint.filename().c_str(), aside.c_str()) != 0) {
    detail::throw_system_error("made", aside, errno);
  }
  detail::rename_path(aside, root / "latest");
  detail::sync_folder(root);
}

void rotate_once(const Path& root, const Path& checkpoint, const CheckpointSeriesOptions& options) {
  const auto saved = complete_ones(root);
  if (!saved.empty()) {
    set_latest(root, saved[0].path);
  }
  for (size_t i = 0; i < saved.size(); ++i) {
    const bool keep = static_cast<int64_t>(i) < options.keep ||
                      (options.keep_every > 0 && saved[i].step % options.keep_every == 0) ||
                      saved[i].path == checkpoint;
    if (!keep) {
      detail::remove_at_once(saved[i].path, saved[i].path.string() + detail::kRemovingSuffix);
    }
  }
}

/// Sets ROOT/latest and removes old checkpoints, on rank 0 after a save. Only one saver does this
/// at a time. If another saver holds the lock, this one leaves the work to the other
/// saver, which looks for new checkpoints after it has released the lock.
void rotate(const Path& root, const Path& checkpoint, const CheckpointSeriesOptions& options) {
  try {
    for (bool more = true; more;) {
      std::vector<std::string> seen;
      {
        const auto lock = detail::File::create(root / kLockName);
        if (!lock.try_lock() && errno == EWOULDBLOCK) { // other errors: no locks here
          return;
        }
        seen = names_in(root);
        rotate_once(root, checkpoint, options);
      }
      const auto now = names_in(root);
      more = !std::includes(seen.begin(), seen.end(), now.begin(), now.end());
    }
  } catch (const std::exception&) { // the checkpoint itself is complete
    TORCH_WARN(
        "[CheckpointSeries] ", checkpoint.string(),
        " is saved, but what is older could not be tidied up: ", detail::current_exception_text());
  }
}

detail::SeriesSteps series_steps(
    const Path& root, const Path& checkpoint, const CheckpointSeriesOptions& options) {
  return {
      .leftovers = kPrefix,
      .newest_time =
          [root] {
            const auto saved = complete_ones(root);
            return saved.empty() ? int64_t{0} : saved[0].time;
          },
      .after = [root, checkpoint, options] { rotate(root, checkpoint, options); }};
}

} // namespace

CheckpointSeries::CheckpointSeries(
    const std::filesystem::path& root, CheckpointSeriesOptions options)
    : root_(root.lexically_normal()), options_(options) {
  TORCH_CHECK_VALUE(!root.empty(), "[CheckpointSeries] the folder has no name");
  TORCH_CHECK_VALUE(
      options.keep >= 1, "[CheckpointSeries] keep is ", options.keep, ", not 1 or more");
  TORCH_CHECK_VALUE(
      options.keep_every >= 0, "[CheckpointSeries] keep_every is ", options.keep_every);
}

void CheckpointSeries::save(int64_t step, const StateDict& state, const SaveOptions& options) {
  TORCH_CHECK_VALUE(step >= 0, "[CheckpointSeries] step is ", step);
  const auto path = step_path(root_, step);
  detail::save(state, path, options, series_steps(root_, path, options_));
}

std::future<void> CheckpointSeries::async_save(
    int64_t step, const StateDict& state, const SaveOptions& options) {
  TORCH_CHECK_VALUE(step >= 0, "[CheckpointSeries] step is ", step);
  const auto path = step_path(root_, step);
  return detail::async_save(state, path, options, series_steps(root_, path, options_));
}

void CheckpointSeries::remove_leftovers() const {
  detail::remove_leftovers(root_, kPrefix);
}

std::optional<std::filesystem::path> CheckpointSeries::latest() const {
  const auto saved = complete_ones(root_);
  return saved.empty() ? std::nullopt : std::optional(saved[0].path);
}

std::vector<std::pair<int64_t, std::filesystem::path>> CheckpointSeries::list() const {
  std::vector<std::pair<int64_t, std::filesystem::path>> result;
  for (const auto& saved : complete_ones(root_)) {
    result.emplace_back(saved.step, saved.path);
  }
  std::sort(result.begin(), result.end());
  return result;
}

} // namespace fsdp
