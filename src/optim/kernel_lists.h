#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

namespace fsdp::detail {

// Note [Small tensors take one thread]
//
// On the CPU a fused kernel lets all threads work on each tensor, however small.
// Waking them takes longer than updating a bias, and where ranks are threads or
// the machine is busy, milliseconds. So the kernel gets small tensors apart from
// large ones, and only the calling thread to work with.

/// The tensors of one kernel call, of one dtype and device: lists of equal
/// length of parameters, gradients and each kind of state.
class KernelLists {
 public:
  using Lists = std::vector<std::vector<at::Tensor>>;
  using Kernel = std::function<void(const Lists&)>;

  /// A fused kernel reads memory in order, so all that belongs to a parameter
  /// must have the same strides: what has not is copied, and `state` replaced.
  void add(
      const at::Tensor& param, const at::Tensor& grad, std::initializer_list<at::Tensor*> state);

  /// Updates all parameters by one or two calls; empty ones are left out.
  /// Moves every version counter, which fused kernels do not.
  void run(const Kernel& kernel);

 private:
  std::vector<at::TensorImpl*> params_;                   // the user's, also the empty ones
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_; // the user's, what is updated
  Lists lists_;
  Lists small_; // see Note [Small tensors take one thread]
};

} // namespace fsdp::detail
