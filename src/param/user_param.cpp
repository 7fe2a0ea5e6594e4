#include "param/user_param.h"

#include <ATen/ATen.h>

namespace fsdp::detail {

const char* OwnTensor::way_out() const {
  return "Call it from inside that forward and through its holder (not as<Impl>()->forward, not an "
         "Impl&), or through fsdp::call where it was sharded by_call; or unshard() the module that "
         "owns it first. To compute with the shard itself, use as_dtensor(param).to_local()";
}

void OwnTensor::add_grad(const at::Tensor& grad) {
  auto& sum = tensor_.mutable_grad();
  if (sum.defined()) {
    sum.add_(grad);
  } else {
    sum = grad.variable_data();
  }
}

void OwnTensor::attached(const at::Tensor& shard) {
  auto& grad = tensor_.mutable_grad();
  if (grad.defined()) {
    grad = grad.to(shard.options()); // Module::to does not change gradients
  }
}

} // namespace fsdp::detail
