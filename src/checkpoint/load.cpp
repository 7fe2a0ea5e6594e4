#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>

#include <fsdp/checkpoint.h>

#include "base/check.h"
#include "base/text.h"
#include "checkpoint/exchange.h"
#include "checkpoint/name_rules.h"
#include "checkpoint/reader.h"

namespace fsdp {

namespace {

/// What a rank has read and not yet put in place.
struct Loaded {
  std::string id;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors; // live, read
  std::vector<std::pair<std::string, StateDict::Value>> values;
};

/// A key of the state dict, and what it is filled from: one of the last two.
struct Source {
  const std::string* key = nullptr;
  std::optional<detail::LocalTensor> target;
  const detail::StoredTensor* tensor = nullptr;
  const detail::StoredValue* value = nullptr;
};

bool is_partial(const StateDict::Value& value) {
  const auto* spread = std::get_if<DTensor>(&value);
  return spread && std::any_of(
                       spread->placements().begin(), spread->placements().end(),
                       [](const auto& item) { return std::holds_alternative<Partial>(item); });
}

/// Everything that can be known to be wrong before anything is read.
std::vector<Source> find_sources(
    const StateDict& state, const detail::Catalog& catalog, const LoadOptions& options) {
  const detail::NameRules rename(options.names);
  const auto folder = catalog.folder.string();
  std::vector<Source> sources;
  std::vector<std::string> missing;
  for (const auto& [key, value] : state) {
    const auto name = rename(key);
    Source source{
        &key, detail::local_tensor(value), catalog.find_tensor(name), catalog.find_value(name)};
    if (!source.tensor && !source.value) {
      missing.push_back(name == key ? "'" + key + "'" : "'" + name + "' (for '" + key + "')");
      continue;
    }
    FSDP_CHECK_AS(
        CheckpointError, source.target.has_value() == (source.tensor != nullptr), folder,
        ", tensor '", name, "': is a ", source.tensor ? "tensor" : "plain value",
        " in the checkpoint, but not where it is to go");
    if (source.target) {
      FSDP_CHECK_AS(
          CheckpointError, !is_partial(value), folder, ", tensor '", name,
          "': the ranks hold terms of a sum where it is to go");
      FSDP_CHECK_AS(
          CheckpointError, source.target->local.defined() && !source.target->local.is_meta(),
          folder, ", tensor '", name,
          "': there is no memory to load it into (undefined, or on meta)");
      FSDP_CHECK_AS(
          CheckpointError, at::has_internal_overlap(source.target->local) != at::MemOverlap::Yes,
          folder, ", tensor '", name, "': elements share memory where it is to go (expand?)");
      const auto dtype = source.target->local.scalar_type();
      FSDP_CHECK_AS(
          CheckpointError, c10::canCast(source.tensor->dtype, dtype), folder, ", tensor '", name,
          "': is ", c10::toString(source.tensor->dtype), " in the checkpoint, which ",
          c10::toString(dtype), " cannot hold");
      FSDP_CHECK_AS(
          CheckpointError, source.target->sizes == source.tensor->sizes, folder, ", tensor '", name,
          "': has shape [", detail::join(source.tensor->sizes), "] in the checkpoint, [",
          detail::join(source.target->sizes), "] where it is to go");
    }
    sources.push_back(std::move(source));
  }
  constexpr size_t kMaxNamed = 10;
  const auto num_missing = missing.size();
  missing.resize(std::min(num_missing, kMaxNamed));
  FSDP_CHECK_AS(
      CheckpointError, num_missing == 0 || !options.strict, folder, ": has no ",
      detail::join(missing),
      num_missing > kMaxNamed ? c10::str(" and others, ", num_missing, " in all") : "");
  return sources;
}

Loaded read_all(
    const StateDict& state, const std::filesystem::path& path, const LoadOptions& options) {
  const auto catalog = detail::open_catalog(path);
  detail::Reader reader(catalog, options.verify);
  Loaded loaded{.id = catalog.id};
  for (const auto& source : find_sources(state, catalog, options)) {
    if (source.target) {
      // In its own dtype at once: the file's may be larger.
      loaded.tensors.emplace_back(
          source.target->local.detach(),
          reader.read(*source.tensor, *source.target).to(source.target->local.scalar_type()));
    } else {
      std::visit(
          [&](const auto& value) { loaded.values.emplace_back(*source.key, value); },
          *source.value);
    }
  }
  return loaded;
}

} // namespace

void load(StateDict& state, const std::filesystem::path& path, const LoadOptions& options) {
  at::NoGradGuard no_grad;
  Loaded loaded;
  std::string error;
  try {
    loaded = read_all(state, path, options);
  } catch (const std::exception&) {
    error = detail::current_exception_text();
    if (error.empty()) {
      error = "unknown";
    }
  }
  // Nothing is changed anywhere before everybody has everything.
  const auto errors = detail::gather_texts(error);
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    FSDP_CHECK_AS(CheckpointError, errors[rank].empty(), "rank ", rank, ": ", errors[rank]);
  }
  const auto ids = detail::gather_texts(loaded.id);
  for (size_t rank = 0; rank < ids.size(); ++rank) {
    FSDP_CHECK_AS(
        CheckpointError, ids[rank] == ids[0], path.string(), ": rank ", rank,
        " read another checkpoint than rank 0: it was replaced meanwhile");
  }
  for (auto& [live, read] : loaded.tensors) {
    live.copy_(read);
    read = at::Tensor(); // as soon as it can be
  }
  for (auto& [key, value] : loaded.values) {
    state.set(key, std::move(value));
  }
}

} // namespace fsdp
