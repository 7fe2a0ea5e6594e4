#include "cli/fuzz/model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>

namespace fsdp::cli::fuzz {

at::Tensor seeded_randn(at::IntArrayRef sizes, c10::ScalarType dtype, int64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  return torch::randn(sizes, generator, torch::kDouble).to(dtype);
}

at::Tensor loss_of(const at::Tensor& output, c10::ScalarType dtype) {
  return (output.to(dtype).pow(2) + 1).sqrt().mean();
}

// ------------------------------------------------------------ Modules

NodeImpl::NodeImpl(const Block& block, Position& position)
    : block(block), number(position.number++), situation_(position.situation) {
  const auto dim = position.c.dim;
  switch (block.kind) {
    case Kind::Linear:
      weight_ = add_parameter("weight", {dim, dim}, position);
      break;
    case Kind::Mlp:
      weight_ = add_parameter("up", {block.size, dim}, position);
      down_ = add_parameter("down", {dim, block.size}, position);
      break;
    case Kind::Norm:
      weight_ = add_parameter("weight", {dim}, position);
      break;
    case Kind::Table:
      weight_ = add_parameter("table", {block.size, dim}, position);
      break;
    case Kind::Scale:
      weight_ = add_parameter("scale", {block.size}, position);
      break;
    case Kind::Chain:
    case Kind::Branches:
      break;
  }
  if (block.bias && block.kind != Kind::Table && block.kind != Kind::Scale) {
    bias_ = add_parameter("bias", {dim}, position);
  }
  for (const auto& inner : block.blocks) {
    auto node = std::make_shared<Hooked<NodeImpl>>(inner, position);
    if (inner.tied >= 0) {
      node->weight_ = node->parameters_["weight"] = nodes[inner.tied]->weight_;
    }
    nodes.push_back(register_module("b" + std::to_string(nodes.size()), node));
  }
}

at::Tensor NodeImpl::add_parameter(
    const std::string& name, at::IntArrayRef sizes, Position& position) {
  const auto seed = parameter_seed(position.c, position.num_params++);
  auto value = seeded_randn(sizes, position.c.dtype, seed).mul_(0.5);
  return register_parameter(name, value, !block.frozen);
}

/// A parameter after the casts of the policy. A sharded model has cast it already.
at::Tensor NodeImpl::shown(const at::Tensor& param) const {
  return casts.params && param.defined() ? param.to(*casts.params) : param;
}

/// The output of a skipped block is its input. If only some ranks skip it, it is a copy. Otherwise
/// two modules could share an output on some ranks only, and backwards would begin in different
/// orders.
static at::Tensor passed_on(const NodeImpl& inner, const at::Tensor& x) {
  return inner.block.skip == Skip::OddRanks ? x.clone() : x;
}

bool NodeImpl::runs(const NodeImpl& inner) const {
  switch (inner.block.skip) {
    case Skip::Never:
      return true;
    case Skip::OddSteps:
      return situation_->step % 2 == 0;
    case Skip::OddRanks:
      return (situation_->step + situation_->rank) % 2 == 0;
  }
  return true;
}

at::Tensor NodeImpl::compute_inner(at::Tensor x) {
  if (block.kind == Kind::Chain) {
    for (int64_t left = block.size; left > 0; --left) {
      for (auto& node : nodes) {
        x = runs(*node) ? node->forward(x) : passed_on(*node, x);
      }
    }
    return x;
  }
  auto sum = x;
  for (auto& node : nodes) {
    sum = runs(*node) ? sum + node->forward(x) : passed_on(*node, sum);
  }
  return sum;
}

at::Tensor NodeImpl::compute(const at::Tensor& input) {
  const auto weight = shown(weight_), bias = shown(bias_);
  if (is_container(block.kind)) {
    const auto y = compute_inner(input);
    return bias.defined() ? torch::tanh(y) + bias : y;
  }
  const auto x = input.to(weight.scalar_type());
  switch (block.kind) {
    case Kind::Linear:
      return torch::tanh(torch::linear(x, weight, bias));
    case Kind::Mlp:
      return x + torch::linear(torch::tanh(torch::linear(x, weight)), shown(down_), bias);
    case Kind::Norm:
      return torch::layer_norm(x, {x.size(-1)}, weight, bias, /*eps=*/0.1); // for mild slopes
    case Kind::Table:
      return x + torch::embedding(weight, torch::arange(x.size(0)).remainder(block.size));
    default:
      return x * (weight.mean() + 1);
  }
}

at::Tensor NodeImpl::forward(const at::Tensor& input) {
  const auto x = casts.inputs ? input.to(*casts.inputs) : input;
  if (situation_->throws_in_forward == number) {
    situation_->throws_in_forward = -1;
    throw Injected();
  }
  auto y = compute(x);
  if (situation_->throws_in_backward == number && y.requires_grad()) {
    y.register_hook([situation = situation_](const at::Tensor&) {
      if (situation->throws_in_backward >= 0) {
        situation->throws_in_backward = -1;
        throw Injected();
      }
    });
  }
  if (situation_->records) {
    situation_->dtypes.push_back(x.scalar_type());
  }
  return casts.outputs ? y.to(*casts.outputs) : y;
}

Node make_model(const Case& c, const std::shared_ptr<Situation>& situation) {
  NodeImpl::Position position{c, situation};
  return Node(c.root, position);
}

namespace {

void collect_nodes(NodeImpl& node, std::vector<NodeImpl*>& nodes) {
  nodes.push_back(&node);
  for (auto& inner : node.nodes) {
    collect_nodes(*inner, nodes);
  }
}

} // namespace

std::vector<NodeImpl*> all_nodes(Node& net) {
  std::vector<NodeImpl*> nodes;
  collect_nodes(*net, nodes);
  return nodes;
}

std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> unique;
  for (const auto& param : module.parameters()) {
    if (std::none_of(
            unique.begin(), unique.end(), [&](const auto& p) { return p.is_same(param); })) {
      unique.push_back(param);
    }
  }
  return unique;
}

} // namespace fsdp::cli::fuzz
