#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

namespace fsdp::detail {

// Note [Small tensors take one thread]
//
// On the CPU a fused kernel uses all threads for each tensor, even for a small one. To wake them
// takes longer than to update a bias; it takes milliseconds if ranks are threads or the machine is
// busy. So small tensors get a kernel call of their own, which uses only the calling thread.

/// The tensors of one kernel call, all of one dtype and device. There is one list of parameters,
/// one of gradients and one for each kind of state; all have the same length.
class KernelLists {
 public:
  using Lists = std::vector<std::vector<at::Tensor>>;
  using Kernel = std::function<void(const Lists&)>;

  /// Adds a parameter. A fused kernel reads memory in order, so the gradient and the state need the
  /// strides of the parameter. Tensors with other strides are copied, and `state` then holds
  /// the copies.
  void add(
      const at::Tensor& param, const at::Tensor& grad, std::initializer_list<at::Tensor*> state);

  /// Updates all parameters except empty ones by one or two kernel calls. Then increments the
  /// version counter of every parameter, which fused kernels do not.
  void run(const Kernel& kernel);

 private:
  std::vector<at::TensorImpl*> params_;                   // the user's, including empty ones
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_; // the user's tensor and its updated copy
  Lists lists_;
  Lists small_; // see Note [Small tensors take one thread]
};

} // namespace fsdp::detail
