#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#include <utility>

namespace fsdp::detail {

// Torch 2.13 holds autograd nodes by intrusive_ptr, torch 2.11 by shared_ptr.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;
using WeakNodePtr = c10::weak_intrusive_ptr<torch::autograd::Node>;
inline WeakNodePtr weak_node(const NodePtr& node) {
  return WeakNodePtr(node);
}
template <class N, class... Args>
NodePtr make_node(Args&&... args) {
  return c10::make_intrusive<N>(std::forward<Args>(args)...);
}
#else
using NodePtr = std::shared_ptr<torch::autograd::Node>;
using WeakNodePtr = std::weak_ptr<torch::autograd::Node>;
inline WeakNodePtr weak_node(const NodePtr& node) {
  return node;
}
template <class N, class... Args>
NodePtr make_node(Args&&... args) {
  return NodePtr(new N(std::forward<Args>(args)...), torch::autograd::deleteNode);
}
#endif

} // namespace fsdp::detail
