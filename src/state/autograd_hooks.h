#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "runtime/autograd_compat.h"

namespace fsdp::detail {

/// Calls `on_backward` when the gradients of all these tensors are there. Replaces each tensor that
/// needs one by a view behind a common node. If they are a module's inputs, the node runs after the
/// module's backward. Writing into such a view throws.
void call_after_gradients(
    const std::vector<at::Tensor*>& tensors, std::function<void()> on_backward);

/// Returns a view of the tensor behind `node`, as a custom Function does. Writing into it in place
/// throws, because the holder of the tensor would not know of the write.
at::Tensor view_behind(const at::Tensor& tensor, const NodePtr& node);

/// Calls `on_backward` when the gradient of any of the tensors arrives. May replace a tensor, if an
/// edit in place would lose its hook.
void call_at_each_gradient(
    const std::vector<at::Tensor*>& tensors, const std::function<void()>& on_backward);

/// Runs `callback` at the end of the current backward. If an exception ends that backward, calls
/// `cut_off` instead.
void at_end_of_backward(std::function<void()> callback, std::function<void()> cut_off);

/// Lets backward run in the thread that calls it, also for tensors on a GPU: observers of
/// collectives, and the ranks of run_ranks, belong to threads.
void keep_backward_in_its_thread(c10::Device device);

/// Whether the calling thread is inside a backward.
bool inside_backward();
/// Whether the current backward keeps its graph for another one (retain_graph).
bool keeps_graph();

} // namespace fsdp::detail
