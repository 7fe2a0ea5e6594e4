#include "state_dict/entries.h"

#include <ATen/ATen.h>
#include <fsdp/distributed.h>
#include <fsdp/param.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/hash.h"
#include "base/text.h"
#include "module/module_tree.h"
#include "param/param_placement.h"
#include "process_group/exchange.h"
#include "runtime/stream.h"
#include "state_dict/from_rank_0.h"

namespace fsdp::detail {

using Value = StateDict::Value;

namespace {

/// Moves an offloaded tensor to the device on which its mesh communicates.
DTensor on_mesh_device(const DTensor& tensor) {
  const auto type = tensor.device_mesh().device_type();
  return tensor.to_local().device().type() == type
             ? tensor
             : DTensor::from_local(
                   tensor.to_local().to(current_device(type)), tensor.device_mesh(),
                   tensor.placements(), tensor.sizes().vec());
}

DTensor to_dtensor(const Entry& entry) {
  const auto& spec = *entry.spec;
  return DTensor::from_local(entry.local, spec.mesh, spec.placements, spec.sizes);
}

at::IntArrayRef whole_sizes(const Entry& entry) {
  return entry.spec ? at::IntArrayRef(entry.spec->sizes) : entry.local.sizes();
}

/// Returns text such as "a, b and 3 more".
std::string some_of(const std::vector<std::string>& names) {
  constexpr size_t kShown = 10;
  const std::vector shown(names.begin(), names.begin() + std::min(names.size(), kShown));
  return join(shown) + (names.size() > kShown ? c10::str(" and ", names.size() - kShown, " more")
                                              : std::string());
}

} // namespace

Entry entry_of(std::string key, const at::Tensor& live) {
  Entry entry{.key = std::move(key), .local = live.detach(), .tensor = live.unsafeGetTensorImpl()};
  if (placement_of(live)) {
    const auto dtensor = as_dtensor(live);
    entry.local = dtensor.to_local();
    entry.spec = {dtensor.device_mesh(), dtensor.placements(), dtensor.sizes().vec()};
  }
  return entry;
}

void reshard_below(torch::nn::Module& module, bool about_to_change) {
  for (const auto& node : subtree_of(module).nodes) {
    if (about_to_change) {
      for (const auto& group : node.state->groups()) {
        group->drop_gather();
      }
    }
    node.state->reshard();
  }
}

template <class T>
T number_as(const std::string& key, const Value& value) {
  std::optional<T> number;
  if (const auto* tensor = std::get_if<at::Tensor>(&value)) { // Python stores steps as tensors
    if (tensor->defined() && tensor->numel() == 1) {
      if (tensor->is_meta()) { // rank 0 sends the value later; only a step can wait for it
        number = std::is_same_v<T, int64_t> ? std::optional<T>(T()) : std::nullopt;
      } else {
        number = tensor->is_floating_point() ? number_as<T>(key, tensor->item<double>())
                                             : number_as<T>(key, tensor->item<int64_t>());
      }
    }
  } else if (const auto* same = std::get_if<T>(&value)) {
    number = *same;
  } else if constexpr (std::is_same_v<T, double>) {
    if (const auto* whole = std::get_if<int64_t>(&value)) {
      number = static_cast<double>(*whole);
    }
  } else if constexpr (std::is_same_v<T, int64_t>) {
    const auto* real = std::get_if<double>(&value);
    if (real && std::trunc(*real) == *real && std::abs(*real) < 0x1p63) {
      number = static_cast<int64_t>(*real);
    }
  }
  TORCH_CHECK_VALUE(
      number, "'", key, "' should be ",
      std::is_same_v<T, bool>     ? "true or false"
      : std::is_same_v<T, double> ? "a number"
                                  : "a whole number");
  return *number;
}
template bool number_as(const std::string&, const Value&);
template int64_t number_as(const std::string&, const Value&);
template double number_as(const std::string&, const Value&);

// ------------------------------------------------------------ Get

namespace {

/// Returns a copy of the whole tensor on rank 0, and an undefined tensor on other ranks. Further
/// training does not change the copy.
at::Tensor gathered(const Entry& entry, const StateDictOptions& options) {
  auto whole = entry.spec ? on_mesh_device(to_dtensor(entry)).full_tensor() : entry.local;
  if (!is_rank_0()) {
    return {};
  }
  const bool shared = whole.is_alias_of(entry.local);
  if (options.cpu_offload && !whole.is_cpu()) {
    return whole.cpu();
  }
  return shared ? whole.clone(at::MemoryFormat::Contiguous) : whole;
}

Value sharded(const Entry& entry, const StateDictOptions& options) {
  auto kept = entry;
  kept.local = options.cpu_offload ? entry.local.cpu() : entry.local;
  return entry.spec ? Value(to_dtensor(kept)) : Value(kept.local);
}

} // namespace

StateDict read(
    const char* function, const std::vector<Entry>& entries, const StateDictOptions& options) {
  at::NoGradGuard no_grad;
  std::vector<std::string> on_meta;
  for (const auto& entry : entries) {
    if (entry.local.defined() && entry.local.is_meta()) {
      on_meta.push_back(entry.key);
    }
  }
  TORCH_CHECK_VALUE(
      on_meta.empty() || !options.full_state_dict, "[", function,
      "] these have no values, on the meta device: ", some_of(on_meta),
      "; call to_empty and give them some first");
  StateDict state;
  std::unordered_map<const void*, Value> known; // a tied tensor is gathered once
  for (const auto& entry : entries) {
    Value value = entry.value;
    if (const auto found = known.find(entry.tensor); entry.tensor && found != known.end()) {
      value = found->second;
    } else if (entry.local.defined()) {
      value = options.full_state_dict ? Value(gathered(entry, options)) : sharded(entry, options);
      known.emplace(entry.tensor, value);
    }
    if (!options.full_state_dict || is_rank_0()) {
      state.insert(entry.key, std::move(value));
    }
  }
  return state;
}

// ------------------------------------------------------------ Set: checks

namespace {

/// Returns why the value does not fit the entry, or "".
std::string misfit(const Entry& entry, const Value& value) {
  if (!entry.local.defined()) {
    try {
      std::visit(
          [&]<class T>(const T&) {
            if constexpr (std::is_arithmetic_v<T>) {
              (void)number_as<T>(entry.key, value);
            }
          },
          entry.value);
    } catch (const c10::ValueError& error) {
      return error.what_without_backtrace();
    }
    return "";
  }
  const auto* tensor = std::get_if<at::Tensor>(&value);
  const auto* dtensor = std::get_if<DTensor>(&value);
  if (!dtensor && !(tensor && tensor->defined())) {
    return c10::str("'", entry.key, "' should be a tensor");
  }
  const auto sizes = dtensor ? dtensor->sizes() : tensor->sizes();
  return sizes == whole_sizes(entry) ? ""
                                     : c10::str(
                                           "'", entry.key, "' has sizes ", sizes,
                                           " in the state dict, here ", whole_sizes(entry));
}

void check(
    const char* function, const std::vector<Entry>& entries, const StateDict& state, bool strict) {
  std::vector<std::string> missing, unexpected, on_meta, misfits;
  std::unordered_set<std::string> known;
  for (const auto& entry : entries) {
    known.insert(entry.key);
    if (!state.contains(entry.key)) {
      if (strict && entry.required) {
        missing.push_back(entry.key);
      }
      continue;
    }
    if (entry.local.defined() && entry.local.is_meta()) {
      on_meta.push_back(entry.key);
    }
    if (auto problem = misfit(entry, state.at(entry.key)); !problem.empty()) {
      misfits.push_back(std::move(problem));
    }
  }
  for (const auto& [key, value] : state) {
    if (strict && !known.contains(key)) {
      unexpected.push_back(key);
    }
  }
  std::string text;
  const auto add = [&](const char* what, const auto& names, const char* way_out) {
    if (!names.empty()) {
      text += c10::str(text.empty() ? "" : "; ", what, some_of(names), way_out);
    }
  };
  const auto* not_strict = " (strict = false leaves them alone)";
  add("missing keys: ", missing, not_strict);
  add("unexpected keys: ", unexpected, not_strict);
  add("these have no memory, on the meta device: ", on_meta, "; call to_empty first");
  add("", misfits, "");
  TORCH_CHECK_VALUE(
      text.empty(), "[", function, "] rank ", current_world().rank, ": ", text,
      ". Nothing was changed");
}

/// Returns true if the ranks have to communicate to set this value.
bool moves(const Entry& entry, const Value& value) {
  const auto* dtensor = std::get_if<DTensor>(&value);
  return dtensor && !(entry.spec && entry.spec->mesh == dtensor->device_mesh() &&
                      entry.spec->placements == dtensor->placements());
}

/// Returns a hash of the tensors that the ranks have to move. It must be the same on all ranks.
int64_t print_of_moves(const std::vector<Entry>& entries, const StateDict& state) {
  auto hash = kEmptyHash;
  for (const auto& entry : entries) {
    if (state.contains(entry.key) && moves(entry, state.at(entry.key))) {
      const auto& from = std::get<DTensor>(state.at(entry.key));
      for (const auto& text : {entry.key, to_string(from.placements()), from.device_mesh().str()}) {
        hash = add_to_hash(hash, text);
      }
    }
  }
  return static_cast<int64_t>(hash >> 2);
}

/// Returns the groups whose ranks tell each other of a failure: the world, or the groups that
/// divide or replicate the module.
std::vector<std::pair<ProcessGroup, at::Device>> groups_of(
    torch::nn::Module& module, bool whole_world) {
  if (whole_world) {
    return {{default_group(), world_device()}};
  }
  std::vector<std::pair<ProcessGroup, at::Device>> groups;
  for (const auto& [name, param] : distinct_parameters(module)) {
    for (const auto& axis : axes_of(param)) {
      const auto is_same = [&](const auto& known) { return known.first == axis.group; };
      if (std::none_of(groups.begin(), groups.end(), is_same)) {
        groups.emplace_back(axis.group, axis.device);
      }
    }
  }
  return groups;
}

/// Throws on all ranks of `groups` if one rank has a failure, or if the ranks would move different
/// tensors.
void agree(
    const char* function,
    const std::vector<std::pair<ProcessGroup, at::Device>>& groups,
    const std::exception_ptr& failure,
    int64_t print) {
  const std::vector<int64_t> mine{failure ? current_world().rank + 1 : 0, print, -print};
  auto all = at::tensor(mine, at::device(at::kCPU).dtype(at::kLong));
  for (const auto& [group, device] : groups) {
    auto shared = all.to(device);
    group.all_reduce(shared, ReduceOp::Max);
    all = shared.to(at::kCPU);
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
  const auto* words = all.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(
      words[0] == 0, "[", function, "] rank ", words[0] - 1,
      " cannot take its state dict, and says why. Nothing was changed on any rank");
  TORCH_CHECK_VALUE(
      words[1] == -words[2], "[", function,
      "] some ranks bring DTensors under keys where others bring whole tensors, or DTensors that "
      "are placed in another way; every rank must bring the same. Nothing was changed");
}

// ------------------------------------------------------------ Set: values

/// Returns this rank's part of a value that all ranks have.
at::Tensor part_for(const Entry& entry, const Value& value) {
  at::Tensor whole;
  if (const auto* dtensor = std::get_if<DTensor>(&value)) {
    if (!moves(entry, value)) {
      return dtensor->to_local();
    }
    const auto moved = on_mesh_device(*dtensor);
    if (entry.spec && entry.spec->mesh == dtensor->device_mesh()) {
      return moved.redistribute(entry.spec->placements).to_local();
    }
    whole = moved.full_tensor();
  } else {
    whole = std::get<at::Tensor>(value).detach();
  }
  if (!entry.spec) {
    return whole;
  }
  const auto& spec = *entry.spec;
  const std::vector<Placement> replicated(spec.placements.size(), Replicate{});
  return redistribute(whole, {spec.mesh, replicated, spec.sizes}, spec.placements);
}

void put(const Entry& entry, const Value& value) {
  if (entry.local.defined()) {
    entry.local.copy_(part_for(entry, value));
  } else if (entry.set) {
    entry.set(value);
  }
}

} // namespace

void fill(const Filling& filling, const StateDict& state, const StateDictOptions& options) {
  const auto* function = filling.function;
  at::NoGradGuard no_grad;
  const bool broadcast = options.broadcast_from_rank0 && current_world().size > 1;
  const auto described = broadcast ? description_from_rank_0(function, state) : state;
  const auto groups = groups_of(filling.module, broadcast);
  std::vector<Entry> entries;
  std::exception_ptr failure;
  int64_t print = 0;
  try {
    entries = filling.entries(described);
    check(function, entries, described, options.strict);
    print = print_of_moves(entries, described);
  } catch (...) {
    failure = std::current_exception();
  }
  agree(function, groups, failure, print);
  if (broadcast) {
    std::unordered_map<std::string, const Entry*> by_key;
    for (const auto& entry : entries) {
      by_key.emplace(entry.key, &entry);
    }
    for (const auto& [key, value] : described) { // in rank 0's order
      const auto* expected = std::get_if<at::Tensor>(&value);
      auto sent = value;
      if (expected) {
        sent = from_rank_0(
            is_rank_0() ? std::get<at::Tensor>(state.at(key)).detach()
                        : at::empty_like(*expected, expected->options().device(world_device())));
      }
      if (const auto found = by_key.find(key); found != by_key.end()) {
        put(*found->second, sent);
      }
    }
  } else {
    for (const auto& entry : entries) {
      if (state.contains(entry.key)) {
        put(entry, state.at(entry.key));
      }
    }
  }
  filling.commit();
}

} // namespace fsdp::detail
