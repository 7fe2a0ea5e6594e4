#include "state/autograd_hooks.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "runtime/stream.h"

namespace fsdp::detail {

namespace {

namespace autograd = torch::autograd;

/// Makes a call, then passes the gradients on unchanged.
class CallNode : public autograd::Node {
 public:
  CallNode(autograd::edge_list next_edges, std::function<void()> call)
      : Node(std::move(next_edges)), call_(std::move(call)) {}

  autograd::variable_list apply(autograd::variable_list&& grads) override {
    call_();
    return std::move(grads);
  }
  std::string name() const override {
    return "FsdpHook";
  }

 private:
  const std::function<void()> call_;
};

NodePtr node_before(const std::vector<at::Tensor*>& tensors, std::function<void()> call) {
  autograd::edge_list edges;
  for (const auto* tensor : tensors) {
    edges.push_back(autograd::impl::gradient_edge(*tensor));
  }
  return make_node<CallNode>(std::move(edges), std::move(call));
}

/// The tensor's tangent, in forward-mode AD. It goes on with its own history.
void keep_tangent(const at::Tensor& from, const at::Tensor& to) {
  if (const auto& tangent = from._fw_grad(/*level=*/0); tangent.defined()) {
    to._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
  }
}

at::Tensor view_without_history(const at::Tensor& tensor) {
  if (!tensor._fw_grad(/*level=*/0).defined()) {
    const at::NoGradGuard no_grad;
    return tensor.view_as(tensor);
  }
  const at::AutoDispatchBelowAutograd no_history; // without grad mode the tangent would have none
  auto view = tensor.view_as(tensor);
  keep_tangent(tensor, view);
  return view;
}

/// True if an edit in place would lose a hook on this tensor and the tensor may be replaced: it is
/// an ordinary view, and no other tensor of the list shares its memory.
bool is_view_alone(const at::Tensor& tensor, const std::vector<at::Tensor*>& all) {
  if (!tensor.is_view() || autograd::impl::get_view_autograd_meta(tensor)->get_creation_meta() !=
                               autograd::CreationMeta::DEFAULT) {
    return false;
  }
  return std::none_of(all.begin(), all.end(), [&](const auto* other) {
    return other != &tensor && other->defined() && other->has_storage() &&
           other->is_alias_of(tensor);
  });
}

std::vector<at::Tensor*> that_need_gradients(const std::vector<at::Tensor*>& tensors) {
  std::vector<at::Tensor*> result;
  if (at::GradMode::is_enabled()) {
    for (auto* tensor : tensors) {
      if (tensor->defined() && tensor->requires_grad()) {
        result.push_back(tensor);
      }
    }
  }
  return result;
}

/// Calls `callback` at the end of backward, or `cut_off` if it is destroyed before.
class EndOfBackward {
 public:
  EndOfBackward(std::function<void()> callback, std::function<void()> cut_off)
      : callback_(std::move(callback)), cut_off_(std::move(cut_off)) {}
  ~EndOfBackward() {
    if (!reached_) {
      cut_off_();
    }
  }
  EndOfBackward(const EndOfBackward&) = delete;
  EndOfBackward& operator=(const EndOfBackward&) = delete;

  void operator()() {
    callback_();
    reached_ = true; // not before: it may throw
  }

 private:
  const std::function<void()> callback_;
  const std::function<void()> cut_off_;
  bool reached_ = false;
};

} // namespace

at::Tensor view_behind(const at::Tensor& tensor, const NodePtr& node) {
  auto view = view_without_history(tensor);
  autograd::impl::get_view_autograd_meta(view)->set_creation_meta(
      autograd::CreationMeta::IN_CUSTOM_FUNCTION);
  autograd::set_history(view, node);
  return view;
}

void call_after_gradients(
    const std::vector<at::Tensor*>& tensors, std::function<void()> on_backward) {
  const auto differentiable = that_need_gradients(tensors);
  if (!differentiable.empty()) {
    const auto node = node_before(differentiable, std::move(on_backward));
    for (auto* tensor : differentiable) {
      *tensor = view_behind(*tensor, node);
    }
  }
}

void call_at_each_gradient(
    const std::vector<at::Tensor*>& tensors, const std::function<void()>& on_backward) {
  const auto differentiable = that_need_gradients(tensors);
  for (auto* tensor : differentiable) {
    if (is_view_alone(*tensor, differentiable)) {
      // Edits of an alias are recorded after the node.
      const auto node = node_before({tensor}, on_backward);
      auto alias = tensor->detach();
      keep_tangent(*tensor, alias);
      autograd::set_history(alias, node);
      *tensor = std::move(alias);
    } else if (!tensor->is_leaf()) {
      tensor->register_hook([on_backward](const at::Tensor&) { on_backward(); });
    }
  }
}

void at_end_of_backward(std::function<void()> callback, std::function<void()> cut_off) {
  auto end = std::make_shared<EndOfBackward>(std::move(callback), std::move(cut_off));
  autograd::Engine::get_default_engine().queue_callback([end] { (*end)(); });
}

void keep_backward_in_its_thread(c10::Device device) {
  if (has_streams(device)) {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  }
}

bool inside_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

bool keeps_graph() {
  return torch::autograd::get_current_graph_task_keep_graph();
}

} // namespace fsdp::detail
