// The first forward finds the root, the states below it, and the names of modules and parameters.
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/text.h"
#include "param/unfilled.h"
#include "runtime/log.h"
#include "state/fsdp_state.h"

namespace fsdp::detail {

// The first module whose forward runs is the root of all modules below it. The states are told only
// after all checks have passed.
void FSDPState::lazy_init() {
  TORCH_CHECK(
      modules_.size() == 1, "[fully_shard] requires a single root module, but '", name_,
      "' is one group of ", modules_.size(),
      " modules; call fully_shard on the module that contains them too, and run that one");
  const auto below = get_subtree_(/*with_tensors=*/true);
  for (const auto& node : below.nodes) {
    TORCH_CHECK(
        node.state.get() == this || !node.state->initialized_,
        "[fully_shard] state has already been lazily initialized for ", node.name,
        ", because its forward ran before that of '", name_,
        "', which contains it; requires running forward through the root module first");
  }
  const auto states = states_in(below);
  set_names(below);
  check_shared_params(below);
  for (const auto& state : states) {
    for (const auto& group : state->groups_) {
      group->lazy_init();
    }
  }
  check_filled(below);
  for (const auto& state : states) {
    context_->states.push_back(state);
    state->context_ = context_;
    state->comm_ = comm_;
    state->initialized_ = true;
    for (const auto& group : state->groups_) {
      group->comm = comm_;
      for (const auto& ranks : group->process_groups()) {
        auto& known = context_->process_groups;
        if (std::find(known.begin(), known.end(), ranks) == known.end()) {
          known.push_back(ranks);
        }
      }
      group->set_on_grad([weak = std::weak_ptr(state)] {
        if (const auto alive = weak.lock()) {
          alive->grad_arrived();
        }
      });
    }
  }
  context_->device = device_;
  comm_->lazy_init(device_);
  warn_of_unmanaged_params(below);
  if (auto_reshard_after_forward) {
    // The root's backward follows at once. Freeing its parameters would cost a gather and save
    // nothing.
    for (const auto& group : groups_) {
      group->set_ranks_after_forward(0);
    }
  }
  log_groups(states);
}

void FSDPState::set_names(const Subtree& below) {
  std::unordered_set<const FSDPState*> named;
  std::unordered_set<const void*> modules;
  for (const auto& node : below.nodes) {
    if (modules.insert(node.module).second) { // registered twice: the first name counts
      auto& state = *node.state;
      state.name_ = named.insert(&state).second ? node.name : state.name_ + ", " + node.name;
    }
  }
  // The smallest number of its groups is the model's number: their order may differ.
  auto model = std::numeric_limits<int64_t>::max();
  for (const auto& node : below.nodes) {
    for (const auto& group : node.state->groups_) {
      model = std::min(model, group->number());
    }
  }
  for (const auto& node : below.nodes) {
    const auto& groups = node.state->groups_;
    for (const auto& group : groups) {
      group->set_name(node.state->name_, model, groups.size() > 1);
    }
  }
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& [name, tensor] : below.params) {
    auto* param = FSDPParam::find(tensor);
    if (param && seen.insert(tensor.unsafeGetTensorImpl()).second) {
      param->set_name(name);
    }
  }
}

// A shared parameter is gathered when a module of its group runs. A module outside of the group
// would see the shard.
void FSDPState::check_shared_params(const Subtree& below) {
  std::unordered_map<const FSDPParam*, std::vector<std::string>> reaches;
  for (const auto& node : below.nodes) {
    for (const auto& group : node.state->groups_) {
      for (const auto& param : group->params()) {
        reaches[param.get()].push_back(node.name.empty() ? "" : node.name + ".");
      }
    }
  }
  for (const auto& [name, tensor] : below.params) {
    const auto found = reaches.find(FSDPParam::find(tensor));
    if (found == reaches.end()) {
      continue;
    }
    const auto& prefixes = found->second;
    const bool inside =
        std::any_of(prefixes.begin(), prefixes.end(), [&site = name](const std::string& prefix) {
          return site.compare(0, prefix.size(), prefix) == 0;
        });
    TORCH_CHECK_VALUE(
        inside, "[fully_shard] parameter '", name, "' is shared with '", found->first->name(),
        "', which is already managed by another FSDP group. For shared parameters, put both "
        "modules in one call of fully_shard");
  }
}

// See Note [Unfilled tensors].
void FSDPState::check_filled(const Subtree& below) {
  std::unordered_set<const at::TensorImpl*> seen;
  std::vector<std::string> unfilled;
  std::vector<std::string> on_meta; // without sharded parameters, whose groups check this
  for (const auto* tensors : {&below.params, &below.buffers}) {
    for (const auto& [name, tensor] : *tensors) {
      if (!seen.insert(tensor.unsafeGetTensorImpl()).second) {
        continue;
      }
      if (is_unfilled(tensor)) {
        unfilled.push_back(name);
      } else if (tensor.is_meta() && !FSDPParam::find(tensor)) {
        on_meta.push_back(name);
      }
    }
  }
  TORCH_CHECK(
      on_meta.empty(), "[fully_shard] these are still on the meta device: ", join(on_meta),
      "; give them memory (to_empty) and values first");
  TORCH_CHECK(
      unfilled.empty(),
      "[fully_shard] nobody has written to these since to_empty: ", join(unfilled),
      "; fill parameters by init_parameters and buffers by copy_, or load a checkpoint");
}

void FSDPState::warn_of_unmanaged_params(const Subtree& below) {
  std::unordered_set<const at::TensorImpl*> known;
  for (const auto& node : below.nodes) {
    for (const auto& param : node.state->ignored_params) {
      known.insert(param.unsafeGetTensorImpl());
    }
  }
  std::vector<std::string> unmanaged;
  for (const auto& [name, tensor] : below.params) {
    if (tensor.requires_grad() && !FSDPParam::find(tensor) &&
        known.insert(tensor.unsafeGetTensorImpl()).second) {
      unmanaged.push_back(name);
    }
  }
  if (!unmanaged.empty()) {
    TORCH_WARN(
        "[fully_shard] these parameters appeared after fully_shard and are not sharded; their "
        "gradients are not reduced: ",
        join(unmanaged));
  }
}

void FSDPState::log_groups(const std::vector<std::shared_ptr<FSDPState>>& states) {
  if (!log_enabled(LogLevel::Info)) {
    return;
  }
  for (const auto& state : states) {
    for (const auto& group : state->groups_) {
      group->log_layout();
    }
  }
}

void FSDPState::share_comm(const FSDPState& first) {
  for (const auto& state : states_below()) {
    state->comm_ = first.comm_;
    for (const auto& group : state->groups_) {
      group->comm = first.comm_;
    }
  }
}

} // namespace fsdp::detail
