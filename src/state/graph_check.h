#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "param/autograd_compat.h"
#include "param/fsdp_param.h"

namespace fsdp::detail {

/// The nodes at which the graph of a forward begins: those of its inputs.
std::vector<NodePtr> graph_begin(const std::vector<at::Tensor*>& inputs);

/// What a forward of a root has computed with, as far as the check needs to know.
struct ForwardGraph {
  std::string module;
  std::vector<at::Tensor*> outputs;
  std::vector<NodePtr> begin;            // see graph_begin
  std::vector<at::Tensor> registered;    // parameters of the module, managed or not
  std::vector<const FSDPParam*> managed; // by fully_shard
};

/// A member that was replaced after fully_shard (`net->head->weight = w`, `net->head = Linear(6,
/// 5)`) is used by forward, but is not registered: it would be trained without the other ranks, and
/// the registered one not at all. C++ cannot tell when it happens, but the graph shows it. Throws
/// if the graph reaches a tensor that is no parameter, of the sizes of a parameter that it does not
/// reach. Warns of any other such tensor.
void check_graph(const ForwardGraph& forward);

} // namespace fsdp::detail
