#include "state/bypass_check.h"

#include <ATen/core/ivalue.h>

#include "param/fsdp_param.h"

namespace fsdp::detail {

namespace {

void check(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  const auto* param = tensor.defined() ? FSDPParam::find(tensor) : nullptr;
  TORCH_CHECK(
      !param || param->face() == Face::Unsharded, "[fully_shard] ", op.operator_name().name,
      " was given parameter '", param ? param->name() : "",
      "' while it is sharded: its module was called around the hooks. Call it through its holder "
      "(not as<Impl>()->forward, not an Impl&), or through fsdp::call where it was sharded "
      "by_call; or unshard() the module that owns it first");
}

} // namespace

void BypassCheck::before(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto num_arguments = op.schema().arguments().size();
  for (size_t i = stack.size() - num_arguments; i < stack.size(); ++i) {
    const auto& argument = stack[i];
    if (argument.isTensor()) {
      check(op, argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const auto& tensor : argument.toTensorVector()) {
        check(op, tensor);
      }
    }
  }
}

} // namespace fsdp::detail
