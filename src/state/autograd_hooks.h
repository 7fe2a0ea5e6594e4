#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace fsdp::detail {

/// Replaces the tensors that need gradients by aliases behind one autograd
/// node that calls `on_backward` when the gradients of all of them are there,
/// then passes these on. Made before a module's operators, it runs after them.
void call_after_gradients(
    const std::vector<at::Tensor*>& tensors, std::function<void()> on_backward);

/// The same with a node for each: `on_backward` is called for each gradient.
void call_at_each_gradient(
    const std::vector<at::Tensor*>& tensors, const std::function<void()>& on_backward);

/// Runs `callback` at the end of the current backward; where that is cut off
/// by an exception, `cut_off` instead.
void at_end_of_backward(std::function<void()> callback, std::function<void()> cut_off);

/// Whether the calling thread is inside a backward.
bool inside_backward();

} // namespace fsdp::detail
