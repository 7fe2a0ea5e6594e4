#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include <fsdp/export.h>
#include <fsdp/module_ref.h>

namespace fsdp {

namespace detail {

/// Replaces the entry `name` in the module's parameter dict by `source`.
FSDP_API void tie_entry(
    torch::nn::Module& module,
    const std::string& name,
    const at::Tensor& member,
    const at::Tensor& source);

} // namespace detail

/// Makes the weight of `module` the same tensor as the weight of `source`, both as a member and
/// in the parameter dict. (Assigning the member alone leaves another tensor in the dict, which
/// would be sharded and saved but never trained.) Call it before fully_shard, and shard both
/// modules in one group.
template <class Holder, class SourceHolder>
void tie_weights(const Holder& module, const SourceHolder& source) {
  detail::tie_entry(*module.ptr(), "weight", module.ptr()->weight, source.ptr()->weight);
  module.ptr()->weight = source.ptr()->weight;
}

} // namespace fsdp
