#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include <fsdp/fully_shard.h>
#include <fsdp/hooked.h>

#include "cli/fuzz/case.h"

namespace fsdp::cli::fuzz {

/// What a block throws because the case says so.
class Injected : public std::runtime_error {
 public:
  Injected() : runtime_error("injected by the fuzzer") {}
};

/// What all modules of a model share.
struct Situation {
  int step = 0;
  int rank = 0;
  int throws_in_forward = -1;  // the number of a block, which throws once
  int throws_in_backward = -1; // the same
  bool records = false;
  std::vector<c10::ScalarType> dtypes = {}; // of inputs and outputs, if it records
};

/// A mixed precision policy as the unsharded model has to follow it.
struct Casts {
  std::optional<c10::ScalarType> params = {};
  std::optional<c10::ScalarType> inputs = {};
  std::optional<c10::ScalarType> outputs = {};
};

/// The module of a Block.
class NodeImpl : public torch::nn::Module {
 public:
  using Ptr = std::shared_ptr<Hooked<NodeImpl>>;
  /// Where the constructor is in the tree.
  struct Position {
    const Case& c;
    std::shared_ptr<Situation> situation;
    int number = 0;
    int num_params = 0;
  };

  NodeImpl(const Block& block, Position& position);
  at::Tensor forward(const at::Tensor& x);

  Block block;
  int number;
  Casts casts; // none in the sharded model
  std::vector<Ptr> nodes;

 private:
  at::Tensor add_parameter(const std::string& name, at::IntArrayRef sizes, Position& position);
  at::Tensor compute(const at::Tensor& x);
  at::Tensor compute_inner(at::Tensor x);
  at::Tensor shown(const at::Tensor& param) const;
  bool runs(const NodeImpl& inner) const;

  std::shared_ptr<Situation> situation_;
  at::Tensor weight_, down_, bias_;
};
FSDP_MODULE(Node);

Node make_model(const Case& c, const std::shared_ptr<Situation>& situation);
/// Returns the handles of the groups.
std::vector<FSDPModule> shard_model(const Case& c, Node& net);
/// Makes an unsharded model compute in the dtypes of the case.
void follow_policies(const Case& c, Node& net);
/// The nodes in the order of their numbers.
std::vector<NodeImpl*> all_nodes(Node& net);
/// The parameters of a module. One that several modules share is there once.
std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module);
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const Case& c, const torch::nn::Module& module, bool sharded);

/// Its slope is at most 1, so that no training explodes.
at::Tensor loss_of(const at::Tensor& output, c10::ScalarType dtype);
at::Tensor seeded_randn(at::IntArrayRef sizes, c10::ScalarType dtype, int64_t seed);

} // namespace fsdp::cli::fuzz
