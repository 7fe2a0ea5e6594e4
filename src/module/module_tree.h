#pragma once

#include <fsdp/module_ref.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <vector>

#include "state/fsdp_state.h"

namespace fsdp::detail {

/// "outer.inner", or "inner" alone.
std::string joined(const std::string& outer, const std::string& inner);

/// Calls `visit(name, module)` for `root` ("") and the modules below it, in
/// order; one that is registered twice is visited twice.
void walk(
    torch::nn::Module& root,
    const std::function<void(const std::string&, torch::nn::Module&)>& visit);

/// The parameters, or buffers, at and below `root`, by name; a shared one once
/// per site.
std::vector<std::pair<std::string, at::Tensor>> named_parameters(torch::nn::Module& root);
std::vector<std::pair<std::string, at::Tensor>> named_buffers(torch::nn::Module& root);
/// The parameters, each once, by its first name.
std::vector<std::pair<std::string, at::Tensor>> distinct_parameters(torch::nn::Module& root);

/// The state that fully_shard gave this very module, or null.
std::shared_ptr<FSDPState> state_of(const torch::nn::Module& module);
/// Puts it into the module, or beside it where that is not hooked.
void set_state(torch::nn::Module& module, std::shared_ptr<FSDPState> state);

/// The sharded modules at and below `root`.
Subtree look_below(torch::nn::Module& root, bool with_tensors = false);
/// The same for several modules, later: those that are gone by then are left out.
LookBelow looking_below(const std::vector<ModuleRef>& roots);

/// Throws where a built-in module's member and its entry in the parameter dict
/// are two tensors: somebody assigned the member to tie it.
void check_members(torch::nn::Module& root);

/// "BlockImpl", without fsdp::Hooked around it.
std::string type_name(const torch::nn::Module& module);
std::string type_name(const std::type_info& type);

} // namespace fsdp::detail
