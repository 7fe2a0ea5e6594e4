#include "parallel/conversion.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "state/autograd_hooks.h"
#include "tensor/redistribute.h"

namespace fsdp::detail {

namespace autograd = torch::autograd;

autograd::variable_list ConversionNode::apply(autograd::variable_list&& grads) {
  at::Tensor sum; // over all uses of the converted tensor
  for (auto& grad : grads) {
    sum = !sum.defined() ? grad : grad.defined() ? sum + grad : sum;
  }
  return {sum.defined() ? convert(sum, conversion_.reversed()) : sum};
}

bool needs_grad(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

autograd::edge_list edges_of(const at::Tensor& tensor) {
  autograd::edge_list edges;
  if (needs_grad(tensor)) {
    edges.push_back(autograd::impl::gradient_edge(tensor));
  }
  return edges;
}

NodePtr node_of(const Conversion& conversion, autograd::edge_list edges) {
  return edges.empty() ? NodePtr() : make_node<ConversionNode>(std::move(edges), conversion);
}

at::Tensor convert_with_node(
    const at::Tensor& local, const Conversion& conversion, const NodePtr& node) {
  if (node) {
    keep_backward_in_its_thread(local.device());
  }
  auto result = local;
  if (conversion.value.from != conversion.value.to) {
    const ScopedModuleLabel for_module(conversion.module);
    result = redistribute(
        local.detach(), {conversion.mesh, {conversion.value.from}, conversion.sizes},
        {conversion.value.to});
  }
  if (result.is_alias_of(local)) {
    return node ? view_behind(local, node) : result;
  }
  if (result.is_view()) {
    result = result.variable_data(); // nobody else has the buffer, so the view may be edited
  }
  if (node) {
    autograd::set_history(result, node);
  }
  return result;
}

at::Tensor convert(const at::Tensor& local, const Conversion& conversion) {
  return convert_with_node(local, conversion, node_of(conversion, edges_of(local)));
}

} // namespace fsdp::detail
