#include "module/module_tree.h"

#include <fsdp/call.h>
#include <fsdp/hooked.h>
#include <fsdp/tie_weights.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <map>
#include <mutex>
#include <unordered_set>
#include <utility>

namespace fsdp::detail {

std::string join_names(const std::string& outer, const std::string& inner) {
  return outer.empty() ? inner : outer + "." + inner;
}

namespace {

void walk_from(
    const std::string& name,
    torch::nn::Module& module,
    const std::function<void(const std::string&, torch::nn::Module&)>& visit) {
  visit(name, module);
  for (const auto& child : module.named_children()) {
    walk_from(join_names(name, child.key()), *child.value(), visit);
  }
}

template <class Of>
std::vector<std::pair<std::string, at::Tensor>> named_tensors(torch::nn::Module& root, Of of) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  walk(root, [&](const std::string& name, torch::nn::Module& module) {
    for (const auto& item : of(module)) {
      if (item.value().defined()) {
        tensors.emplace_back(join_names(name, item.key()), item.value());
      }
    }
  });
  return tensors;
}

/// The state of a module that is not hooked. It is dropped some time after the module is gone.
struct UnhookedState {
  std::weak_ptr<torch::nn::Module> module;
  std::shared_ptr<FSDPState> state;
};
std::mutex unhooked_states_mutex;
std::map<const torch::nn::Module*, UnhookedState> unhooked_states;

/// Gives access to a module's parameter dict, which is protected and has no setter.
struct DictAccess : torch::nn::Module {
  static torch::OrderedDict<std::string, at::Tensor>& of(torch::nn::Module& module) {
    return module.*(&DictAccess::parameters_);
  }
};

void check_member(
    const std::string& module, const char* name, const at::Tensor& member, torch::nn::Module& in) {
  const auto* entry = DictAccess::of(in).find(name);
  TORCH_CHECK_VALUE(
      !entry || !member.defined() || entry->is_same(member), "[fully_shard] '", module, ".", name,
      "' is another tensor as a member than in the module's parameters: somebody assigned the "
      "member. To tie weights, use fsdp::tie_weights(module, source)");
}

template <class... Impl>
void check_members_of(const std::string& name, torch::nn::Module& module) {
  (
      [&] {
        if (const auto* impl = dynamic_cast<const Impl*>(&module)) {
          check_member(name, "weight", impl->weight, module);
          if constexpr (requires { impl->bias; }) {
            check_member(name, "bias", impl->bias, module);
          }
        }
      }(),
      ...);
}

} // namespace

void walk(
    torch::nn::Module& root,
    const std::function<void(const std::string&, torch::nn::Module&)>& visit) {
  walk_from("", root, visit);
}

std::vector<std::pair<std::string, at::Tensor>> named_parameters(torch::nn::Module& root) {
  return named_tensors(
      root, [](const auto& module) { return module.named_parameters(/*recurse=*/false); });
}

std::vector<std::pair<std::string, at::Tensor>> named_buffers(torch::nn::Module& root) {
  return named_tensors(
      root, [](const auto& module) { return module.named_buffers(/*recurse=*/false); });
}

std::vector<std::pair<std::string, at::Tensor>> distinct_parameters(torch::nn::Module& root) {
  auto params = named_parameters(root);
  std::unordered_set<const at::TensorImpl*> seen;
  std::erase_if(params, [&](const auto& item) {
    return !seen.insert(item.second.unsafeGetTensorImpl()).second;
  });
  return params;
}

std::shared_ptr<FSDPState> state_of(const torch::nn::Module& module) {
  if (const auto* hookable = dynamic_cast<const Hookable*>(&module)) {
    return hookable->fsdp_state;
  }
  std::lock_guard lock(unhooked_states_mutex);
  const auto found = unhooked_states.find(&module);
  // Another module may have the address of one that is gone.
  return found != unhooked_states.end() && !found->second.module.expired() ? found->second.state
                                                                           : nullptr;
}

void set_state(torch::nn::Module& module, std::shared_ptr<FSDPState> state) {
  if (auto* hookable = dynamic_cast<Hookable*>(&module)) {
    hookable->fsdp_state = std::move(state);
    return;
  }
  std::map<const torch::nn::Module*, UnhookedState> ended; // destroyed after the lock is released
  std::lock_guard lock(unhooked_states_mutex);
  for (auto it = unhooked_states.begin(); it != unhooked_states.end();) {
    auto next = std::next(it);
    if (it->second.module.expired()) {
      ended.insert(unhooked_states.extract(it));
    }
    it = next;
  }
  unhooked_states[&module] = {module.shared_from_this(), std::move(state)};
}

Subtree subtree_of(torch::nn::Module& root, bool with_tensors) {
  Subtree below;
  walk(root, [&](const std::string& name, torch::nn::Module& module) {
    if (auto state = state_of(module)) {
      below.nodes.push_back({name, &module, std::move(state)});
    }
  });
  if (with_tensors) {
    below.params = named_parameters(root);
    below.buffers = named_buffers(root);
  }
  return below;
}

SubtreeFunction subtree_function(const std::vector<ModuleRef>& roots) {
  struct Root {
    torch::nn::Module* module;
    std::weak_ptr<torch::nn::Module> owned;
    bool is_owned; // else the module is on a stack and holds its state itself
  };
  std::vector<Root> kept;
  for (const auto& root : roots) {
    auto owned = root->weak_from_this();
    const bool is_owned = !owned.expired();
    kept.push_back({&*root, std::move(owned), is_owned});
  }
  return [kept = std::move(kept)](bool with_tensors) {
    Subtree below;
    bool any = false;
    for (const auto& root : kept) {
      if (root.is_owned && root.owned.expired()) {
        continue;
      }
      any = true;
      auto part = subtree_of(*root.module, with_tensors);
      below.nodes.insert(below.nodes.end(), part.nodes.begin(), part.nodes.end());
      below.params.insert(below.params.end(), part.params.begin(), part.params.end());
      below.buffers.insert(below.buffers.end(), part.buffers.begin(), part.buffers.end());
    }
    TORCH_CHECK(any, "[FSDPModule] the module of this handle is gone");
    return below;
  };
}

void check_members(torch::nn::Module& root) {
  namespace nn = torch::nn;
  walk(root, [](const std::string& name, nn::Module& module) {
    check_members_of<
        nn::LinearImpl, nn::BilinearImpl, nn::EmbeddingImpl, nn::EmbeddingBagImpl,
        nn::LayerNormImpl, nn::GroupNormImpl, nn::BatchNorm1dImpl, nn::BatchNorm2dImpl,
        nn::BatchNorm3dImpl, nn::Conv1dImpl, nn::Conv2dImpl, nn::Conv3dImpl,
        nn::ConvTranspose1dImpl, nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl>(name, module);
  });
}

std::string type_name(const torch::nn::Module& module) {
  return type_name(typeid(module));
}

std::string type_name(const std::type_info& type) {
  auto name = c10::demangle(type.name());
  const std::string prefix = "fsdp::Hooked<";
  if (name.rfind(prefix, 0) == 0) {
    name = name.substr(prefix.size(), name.size() - prefix.size() - 1);
  }
  return name;
}

CallSite call_site(const torch::nn::Module& module) {
  // No hooks are given here: the forward of a hooked module runs them in a scope of its own.
  return {state_of(module), &module};
}

CallSite recomputation_site(const torch::nn::Module& module) {
  auto site = call_site(module);
  if (const auto* hookable = dynamic_cast<const Hookable*>(&module)) {
    site.hooks = &hookable->fsdp_hooks;
  }
  return site;
}

void tie_entry(
    torch::nn::Module& module,
    const std::string& name,
    const at::Tensor& member,
    const at::Tensor& source) {
  for (const auto& tensor : {member, source}) {
    TORCH_CHECK_VALUE(
        !FSDPParam::find(tensor), "[tie_weights] '", name,
        "' is sharded already; tie weights before fully_shard");
  }
  TORCH_CHECK_VALUE(
      member.sizes() == source.sizes(), "[tie_weights] '", name, "' has sizes ", member.sizes(),
      ", that of the source ", source.sizes());
  auto* entry = DictAccess::of(module).find(name);
  TORCH_CHECK_VALUE(entry, "[tie_weights] the module has no parameter '", name, "'");
  *entry = source;
}

} // namespace fsdp::detail
