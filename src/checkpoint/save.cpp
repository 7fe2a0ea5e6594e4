#include <fsdp/checkpoint.h>

#include "checkpoint/writer.h"

namespace fsdp {

void save(const StateDict& state, const std::filesystem::path& path, const SaveOptions& options) {
  detail::save(state, path, options, {});
}

std::future<void> async_save(
    const StateDict& state, const std::filesystem::path& path, const SaveOptions& options) {
  return detail::async_save(state, path, options, {});
}

namespace detail {

void save(
    const StateDict& state,
    const Path& path,
    const SaveOptions& options,
    const SeriesSteps& steps) {
  run_save(begin_save(state, path, options, steps.leftovers), steps);
}

} // namespace detail
} // namespace fsdp
