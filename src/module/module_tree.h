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

/// Returns "outer.inner", or "inner" if `outer` is empty.
std::string join_names(const std::string& outer, const std::string& inner);

/// Calls `visit(name, module)` for `root` (with the name "") and the modules below it, in order. A
/// module that is registered twice is visited twice.
void walk(
    torch::nn::Module& root,
    const std::function<void(const std::string&, torch::nn::Module&)>& visit);

/// The parameters, or buffers, at and below `root`, with their names. A shared tensor is listed
/// under each of its names.
std::vector<std::pair<std::string, at::Tensor>> named_parameters(torch::nn::Module& root);
std::vector<std::pair<std::string, at::Tensor>> named_buffers(torch::nn::Module& root);
/// The parameters, each once, with its first name.
std::vector<std::pair<std::string, at::Tensor>> distinct_parameters(torch::nn::Module& root);

/// The state that fully_shard gave this very module, or null.
std::shared_ptr<FSDPState> state_of(const torch::nn::Module& module);
/// Stores the state in the module, or in a table if the module is not hooked.
void set_state(torch::nn::Module& module, std::shared_ptr<FSDPState> state);

/// The sharded modules at and below `root`; `with_tensors` adds all parameters and buffers.
Subtree subtree_of(torch::nn::Module& root, bool with_tensors = false);
/// Returns a function that does the same later, for those of `roots` that still exist then.
SubtreeFunction subtree_function(const std::vector<ModuleRef>& roots);

/// Throws ValueError if a built-in module's member and its entry in the parameter dict are
/// different tensors: somebody assigned the member to tie weights.
void check_members(torch::nn::Module& root);

/// The name of the type, for example "BlockImpl", without fsdp::Hooked around it.
std::string type_name(const torch::nn::Module& module);
std::string type_name(const std::type_info& type);

} // namespace fsdp::detail
