#include <fsdp/state_dict.h>

#include <ATen/ATen.h>

#include "module/module_tree.h"
#include "state_dict/entries.h"

namespace fsdp {

namespace {

using detail::Entry;

/// Returns the entries in Python's order: a module's parameters, its buffers, then the entries of
/// its submodules. All buffers are included: LibTorch has no non-persistent buffers.
std::vector<Entry> entries_of(torch::nn::Module& root, bool ignore_frozen, bool setting) {
  std::vector<Entry> entries;
  detail::walk(root, [&](const std::string& prefix, torch::nn::Module& module) {
    const auto name = [&](const std::string& own) { return detail::join_names(prefix, own); };
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const auto& param = item.value();
      const bool ignored = ignore_frozen && !param.requires_grad();
      if (!param.defined() || (ignored && !setting)) {
        continue;
      }
      const auto* managed = detail::FSDPParam::find(param);
      TORCH_CHECK_VALUE(
          !setting || !managed || managed->face() == detail::Face::Sharded,
          "[set_model_state_dict] parameter '", name(item.key()),
          "' is unsharded; reshard() the module that it was sharded with first");
      entries.push_back(detail::entry_of(name(item.key()), param));
      entries.back().required = !ignored;
    }
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      if (item.value().defined()) {
        entries.push_back(detail::entry_of(name(item.key()), item.value()));
      }
    }
  });
  return entries;
}

} // namespace

StateDict get_model_state_dict(ModuleRef module, const StateDictOptions& options) {
  detail::reshard_below(*module);
  return detail::read(
      "get_model_state_dict", entries_of(*module, options.ignore_frozen_params, /*setting=*/false),
      options);
}

void set_model_state_dict(
    ModuleRef module, const StateDict& state, const StateDictOptions& options) {
  detail::reshard_below(*module, /*about_to_change=*/true);
  detail::fill(
      {.function = "set_model_state_dict",
       .module = *module,
       .entries =
           [&](const StateDict&) {
             return entries_of(*module, options.ignore_frozen_params, /*setting=*/true);
           }},
      state, options);
}

} // namespace fsdp
