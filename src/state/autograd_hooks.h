#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "param/autograd_compat.h"

namespace fsdp::detail {

/// Replaces the tensors that need gradients by views of them behind one autograd
/// node that calls `on_backward` when the gradients of all of them are there,
/// then passes these on. Made before a module's operators, it runs after them.
/// An edit of such a view in place throws.
void call_after_gradients(
    const std::vector<at::Tensor*>& tensors, std::function<void()> on_backward);

/// A view of the tensor behind `node`, as a custom Function would return it: to
/// write into it in place throws, because whoever holds the tensor would not
/// learn of it.
at::Tensor view_behind(const at::Tensor& tensor, const NodePtr& node);

/// Calls `on_backward` when the gradient of any of the tensors arrives. May
/// replace a tensor where a hook would be lost in an edit in place.
void call_at_each_gradient(
    const std::vector<at::Tensor*>& tensors, const std::function<void()>& on_backward);

/// Runs `callback` at the end of the current backward; where that is cut off
/// by an exception, `cut_off` instead.
void at_end_of_backward(std::function<void()> callback, std::function<void()> cut_off);

/// Lets backward run in the thread that calls it, also for tensors on a GPU: observers of
/// collectives, and the ranks of run_ranks, belong to threads.
void keep_backward_in_its_thread(c10::Device device);

/// Whether the calling thread is inside a backward.
bool inside_backward();
/// Whether the one under way leaves its graph for another.
bool keeps_graph();

} // namespace fsdp::detail
