#include "param/user_param.h"

#include <ATen/ATen.h>

namespace fsdp::detail {

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
