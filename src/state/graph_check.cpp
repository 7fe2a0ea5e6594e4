#include "state/graph_check.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>

#include "base/text.h"

namespace fsdp::detail {

namespace {

namespace autograd = torch::autograd;

/// The tensors at the ends of the graph whose gradients backward will accumulate.
struct Leaves {
  std::unordered_set<const FSDPParam*> managed;
  std::vector<at::Tensor> others;
};

Leaves leaves_of(const ForwardGraph& forward) {
  Leaves leaves;
  std::unordered_set<const autograd::Node*> seen;
  std::vector<const autograd::Node*> open;
  const auto visit = [&](const autograd::Node* node) {
    if (node && seen.insert(node).second) {
      open.push_back(node);
    }
  };
  for (const auto& node : forward.begin) {
    seen.insert(node.get()); // the graph behind an input is not the module's
  }
  for (const auto* output : forward.outputs) {
    visit(output->defined() ? output->grad_fn().get() : nullptr);
  }
  while (!open.empty()) {
    const auto* node = open.back();
    open.pop_back();
    if (const auto* end = dynamic_cast<const autograd::AccumulateGrad*>(node)) {
      if (const auto* param = FSDPParam::find(end->variable)) {
        leaves.managed.insert(param);
      } else {
        leaves.others.push_back(end->variable);
      }
    } else if (const auto* param = FSDPParam::of_accumulator(node)) {
      leaves.managed.insert(param);
    }
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  return leaves;
}

} // namespace

std::vector<NodePtr> graph_begin(const std::vector<at::Tensor*>& inputs) {
  std::vector<NodePtr> nodes;
  for (const auto* input : inputs) {
    if (input->defined() && input->requires_grad()) {
      nodes.push_back(autograd::impl::gradient_edge(*input).function);
    }
  }
  return nodes;
}

void check_graph(const ForwardGraph& forward) {
  const auto leaves = leaves_of(forward);
  for (const auto& tensor : leaves.others) {
    const bool is_registered = std::any_of(
        forward.registered.begin(), forward.registered.end(),
        [&](const at::Tensor& param) { return param.is_same(tensor); });
    if (is_registered) {
      continue;
    }
    for (const auto* param : forward.managed) {
      TORCH_CHECK(
          leaves.managed.contains(param) || param->geometry().sizes != tensor.sizes() ||
              !param->user().tensor().requires_grad(),
          "[fully_shard] the forward of ", module_text(forward.module),
          " does not use its parameter '", param->name(), "', but a tensor of the same sizes, ",
          tensor.sizes(),
          ", that requires gradients and is not registered: was the member replaced after "
          "fully_shard? Replace it before, or write the new values into the parameter: "
          "param.set_data(values)");
    }
    TORCH_WARN(
        "[fully_shard] the forward of ", module_text(forward.module), " uses a tensor of sizes ",
        tensor.sizes(),
        " that requires gradients, but is neither registered nor an input. Its "
        "gradient is not reduced over the ranks");
  }
}

} // namespace fsdp::detail
