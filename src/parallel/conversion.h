#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/placement.h>

#include "process_group/observer.h"
#include "runtime/autograd_compat.h"

namespace fsdp::detail {

struct Step {
  Placement from, to;
};

/// A move of a local tensor to another placement on a mesh of one axis, and of its gradient back.
struct Conversion {
  DeviceMesh mesh;
  std::vector<int64_t> sizes; // of the whole tensor
  Step value, grad;
  std::string module;    // that collectives are labelled with, or ""
  bool of_input = false; // the tensor is an input of `module`, and only `module` has the result

  /// The conversion that moves the gradient.
  Conversion reversed() const {
    auto result = *this;
    std::swap(result.value, result.grad);
    return result;
  }
};

/// The autograd node of a converted tensor. Converts its gradient back.
class ConversionNode : public torch::autograd::Node {
 public:
  ConversionNode(torch::autograd::edge_list next_edges, Conversion conversion)
      : Node(std::move(next_edges)), conversion_(std::move(conversion)) {}

  const Conversion& conversion() const {
    return conversion_;
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  std::string name() const override {
    return "FsdpRedistribute";
  }

 private:
  const Conversion conversion_;
};

/// Returns true if autograd records operators on `tensor`.
bool needs_grad(const at::Tensor& tensor);
/// The edge along which the gradient of `tensor` flows. Empty if it needs no gradient.
torch::autograd::edge_list edges_of(const at::Tensor& tensor);
/// Returns null if `edges` is empty.
NodePtr node_of(const Conversion& conversion, torch::autograd::edge_list edges);

/// Returns the converted tensor. Its gradient flows through `node`, if `node` is not null.
at::Tensor convert_with_node(
    const at::Tensor& local, const Conversion& conversion, const NodePtr& node);
at::Tensor convert(const at::Tensor& local, const Conversion& conversion);

/// While this object lives, collectives are labelled with `module`, unless `module` is empty.
class ScopedModuleLabel {
 public:
  explicit ScopedModuleLabel(const std::string& module) {
    if (!module.empty()) {
      label_.emplace(module);
    }
  }

 private:
  std::optional<CollectiveLabel> label_;
};

} // namespace fsdp::detail
