#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/placement.h>

#include "param/autograd_compat.h"
#include "process_group/observer.h"

namespace fsdp::detail {

struct Step {
  Placement from, to;
};

/// A move of local tensors with all that it needs, over a mesh of one axis.
struct Conversion {
  DeviceMesh mesh;
  std::vector<int64_t> sizes; // of the whole
  Step value, grad;
  std::string module;    // for whom, or ""
  bool of_input = false; // of the module, which is the only one that has the result

  /// That of the gradient.
  Conversion reversed() const {
    auto result = *this;
    std::swap(result.value, result.grad);
    return result;
  }
};

/// Moves the gradients of what was moved.
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

/// Whether autograd records what is done with it.
bool needs_grad(const at::Tensor& tensor);
/// To where the gradient of `tensor` goes; none where it needs none.
torch::autograd::edge_list edges_of(const at::Tensor& tensor);
/// Null without edges.
NodePtr node_of(const Conversion& conversion, torch::autograd::edge_list edges);

/// The moved tensor, behind the node if there is one.
at::Tensor convert_behind(
    const at::Tensor& local, const Conversion& conversion, const NodePtr& node);
at::Tensor convert(const at::Tensor& local, const Conversion& conversion);

/// Collectives are for this module, if one is named; else for whom they were.
class ForModule {
 public:
  explicit ForModule(const std::string& module) {
    if (!module.empty()) {
      label_.emplace(module);
    }
  }

 private:
  std::optional<CollectiveLabel> label_;
};

} // namespace fsdp::detail
