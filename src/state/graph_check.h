#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "param/fsdp_param.h"
#include "runtime/autograd_compat.h"

namespace fsdp::detail {

/// The nodes at which the graph of a forward begins: the nodes of its inputs.
std::vector<NodePtr> graph_begin(const std::vector<at::Tensor*>& inputs);

/// The parts of a root's forward that check_graph looks at.
struct ForwardGraph {
  std::string module;
  std::vector<at::Tensor*> outputs;
  std::vector<NodePtr> begin;            // see graph_begin
  std::vector<at::Tensor> registered;    // parameters of the module, managed or not
  std::vector<const FSDPParam*> managed; // by fully_shard
};

/// A member that was replaced after fully_shard (`net->head->weight = w`, `net->head = Linear(6,
/// 5)`) is used by forward, but is not registered. It would be trained without the other ranks, and
/// the registered one not at all. C++ cannot tell when that happens, but the graph shows it. Throws
/// if the graph reaches a tensor that is not a parameter but has the sizes of a parameter
/// that the graph misses. Warns of any other tensor that is not a parameter.
void check_graph(const ForwardGraph& forward);

} // namespace fsdp::detail
