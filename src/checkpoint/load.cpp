#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include <fsdp/checkpoint.h>
#include <fsdp/distributed.h>

#include "base/check.h"
#include "base/text.h"
#include "checkpoint/name_rules.h"
#include "checkpoint/reader.h"
#include "checkpoint/writer.h"

namespace fsdp {

namespace {

/// A key of the state dict, and its source: either `tensor` or `value`.
struct Source {
  const std::string* key = nullptr;
  std::optional<detail::LocalTensor> target;
  const detail::StoredTensor* tensor = nullptr;
  const detail::StoredValue* value = nullptr;
  at::Tensor kept = {}; // the data, if they cannot be read directly into the target
  std::optional<StateDict::Value> number =
      {}; // the element of `tensor`, if a plain value is wanted
};

bool is_partial(const StateDict::Value& value) {
  const auto* spread = std::get_if<DTensor>(&value);
  return spread && std::any_of(
                       spread->placements().begin(), spread->placements().end(),
                       [](const auto& item) { return std::holds_alternative<Partial>(item); });
}

/// Python stores the steps of optimizers as tensors without dims. They may go where a number is.
bool takes_element(const Source& source, const StateDict::Value& value) {
  return source.tensor && source.tensor->sizes.empty() &&
         !c10::isComplexType(source.tensor->dtype) &&
         (std::holds_alternative<bool>(value) || std::holds_alternative<int64_t>(value) ||
          std::holds_alternative<double>(value));
}

/// Says what the checkpoint has instead of a value of this name, if Python saved something there.
std::string object_text(const detail::Catalog& catalog, const std::string& name) {
  for (const auto& object : catalog.objects) {
    if (name == object.name || name.starts_with(object.name + ".")) {
      return c10::str(
          " (it has the object '", object.name, "'",
          object.type.empty() ? "" : " of type " + object.type, ", which only Python can read)");
    }
  }
  return "";
}

/// Returns the source of each key. Throws CheckpointError for everything that can be found to be
/// wrong before tensor data is read.
std::vector<Source> find_sources(
    const StateDict& state, const detail::Catalog& catalog, const LoadOptions& options) {
  const auto rename = detail::renaming_by(options.names);
  const auto folder = catalog.folder.string();
  constexpr size_t kMaxNamed = 10;
  std::vector<Source> sources;
  std::vector<std::string> missing;
  for (const auto& [key, value] : state) {
    const auto name = rename(key);
    Source source{
        &key, detail::local_tensor(value), catalog.find_tensor(name), catalog.find_value(name)};
    if (!source.tensor && !source.value) {
      missing.push_back(
          (name == key ? "'" + key + "'" : "'" + name + "' (for '" + key + "')") +
          (missing.size() < kMaxNamed ? object_text(catalog, name) : ""));
      continue;
    }
    FSDP_CHECK_AS(
        CheckpointError,
        source.target.has_value() == (source.tensor != nullptr) || takes_element(source, value),
        folder, ", tensor '", name, "': is a ", source.tensor ? "tensor" : "plain value",
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
  const auto num_missing = missing.size();
  missing.resize(std::min(num_missing, kMaxNamed));
  FSDP_CHECK_AS(
      CheckpointError, num_missing == 0 || !options.strict, folder, ": has no ",
      detail::join(missing),
      num_missing > kMaxNamed ? c10::str(" and others, ", num_missing, " in all") : "");
  return sources;
}

/// Returns true if the bytes in the file can be read directly into the tensor's memory.
bool goes_straight(const Source& source) {
  const auto& local = source.target->local;
  return local.is_cpu() && local.is_contiguous() && !local.is_conj() && !local.is_neg() &&
         local.scalar_type() == source.tensor->dtype;
}

/// Returns a tensor's one element. A whole number that goes where one is stays one.
StateDict::Value element_of(const at::Tensor& tensor, const StateDict::Value& before) {
  if (tensor.scalar_type() == at::kBool) {
    return tensor.item<bool>();
  }
  if (!tensor.is_floating_point()) {
    return tensor.item<int64_t>();
  }
  const auto number = tensor.item<double>();
  const bool is_whole = std::trunc(number) == number && std::abs(number) < 0x1p63;
  return is_whole && std::holds_alternative<int64_t>(before)
             ? StateDict::Value(static_cast<int64_t>(number))
             : StateDict::Value(number);
}

/// A rank's load. The constructor reads and checks everything, then `finish` changes the tensors.
/// Data that can be read directly into the live tensors is read twice, the second time from the
/// page cache: this is faster than a copy in between, and needs no memory for it. Other data is
/// kept until `finish`.
class Loading {
 public:
  Loading(const StateDict& state, const std::filesystem::path& path, const LoadOptions& options)
      : catalog_(detail::open_catalog(path)),
        reader_(catalog_, options.verify),
        sources_(find_sources(state, catalog_, options)) {
    for (auto& source : sources_) {
      if (source.tensor && !source.target) {
        const detail::LocalTensor target{at::empty({}, at::device(at::kMeta)), {}, {{}}};
        source.number = element_of(reader_.read(*source.tensor, target), state.at(*source.key));
      } else if (source.target && goes_straight(source)) {
        reader_.check(*source.tensor, *source.target);
      } else if (source.target) {
        // Convert the dtype at once: the dtype in the file may need more memory.
        source.kept =
            reader_.read(*source.tensor, *source.target).to(source.target->local.scalar_type());
      }
    }
  }

  const std::string& id() const {
    return catalog_.id;
  }

  void finish(StateDict& state) {
    for (auto& source : sources_) {
      if (source.number) {
        state.set(*source.key, *source.number);
      } else if (source.kept.defined()) {
        source.target->local.detach().copy_(source.kept);
        source.kept = at::Tensor(); // free its memory at once
      } else if (source.target) {
        const auto live = source.target->local.detach();
        reader_.read_checked(*source.tensor, *source.target, live.mutable_data_ptr());
        live.unsafeGetTensorImpl()->bump_version();
      } else {
        std::visit([&](const auto& value) { state.set(*source.key, value); }, *source.value);
      }
    }
  }

 private:
  const detail::Catalog catalog_;
  detail::Reader reader_;
  std::vector<Source> sources_;
};

/// If `body` throws on one rank, throws CheckpointError on all ranks, with `consequence` before the
/// error. Collective.
template <class F>
void fail_together(const char* consequence, F body) {
  std::string error;
  try {
    body();
  } catch (const std::exception&) {
    error = detail::current_exception_text();
    if (error.empty()) {
      error = "unknown";
    }
  }
  const auto errors = gather_texts(error);
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    FSDP_CHECK_AS(
        CheckpointError, errors[rank].empty(), consequence, "rank ", rank, ": ", errors[rank]);
  }
}

} // namespace

void load(StateDict& state, const std::filesystem::path& path, const LoadOptions& options) {
  at::NoGradGuard no_grad;
  // An async_save may still be writing the checkpoint to load, or may have failed.
  fail_together("", detail::finish_previous_save);
  std::optional<Loading> loading;
  // No rank changes anything before all ranks have read and checked everything.
  fail_together("", [&] { loading.emplace(state, path, options); });
  const auto ids = gather_texts(loading->id());
  for (size_t rank = 0; rank < ids.size(); ++rank) {
    FSDP_CHECK_AS(
        CheckpointError, ids[rank] == ids[0], path.string(), ": rank ", rank,
        " read another checkpoint than rank 0: it was replaced meanwhile");
  }
  // A file may still be changed or damaged between the two reads.
  fail_together(
      "the tensors are partly loaded, load them again: ", [&] { loading->finish(state); });
}

} // namespace fsdp
