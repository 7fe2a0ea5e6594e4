#include "state/autograd_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <memory>
#include <utility>

#include "param/autograd_compat.h"

namespace fsdp::detail {

namespace {

namespace autograd = torch::autograd;

/// Passes gradients on unchanged, after a call.
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

/// An alias, not a view: it shares memory and version counter, and an in-place
/// edit of it is recorded behind the node instead of losing it.
void insert_node(const std::vector<at::Tensor*>& tensors, std::function<void()> call) {
  autograd::edge_list edges;
  for (const auto* tensor : tensors) {
    edges.push_back(autograd::impl::gradient_edge(*tensor));
  }
  const auto node = make_node<CallNode>(std::move(edges), std::move(call));
  for (auto* tensor : tensors) {
    auto alias = tensor->detach();
    autograd::set_history(alias, node);
    *tensor = std::move(alias);
  }
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

/// Calls one thing if it was reached, the other if it is destroyed before.
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

void call_after_gradients(
    const std::vector<at::Tensor*>& tensors, std::function<void()> on_backward) {
  const auto differentiable = that_need_gradients(tensors);
  if (!differentiable.empty()) {
    insert_node(differentiable, std::move(on_backward));
  }
}

void call_at_each_gradient(
    const std::vector<at::Tensor*>& tensors, const std::function<void()>& on_backward) {
  for (auto* tensor : that_need_gradients(tensors)) {
    insert_node({tensor}, on_backward);
  }
}

void at_end_of_backward(std::function<void()> callback, std::function<void()> cut_off) {
  auto end = std::make_shared<EndOfBackward>(std::move(callback), std::move(cut_off));
  autograd::Engine::get_default_engine().queue_callback([end] { (*end)(); });
}

bool inside_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

} // namespace fsdp::detail
