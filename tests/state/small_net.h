#pragma once

#include "support/sharded.h"

namespace fsdp::test {

/// Three MLPs, each a group when sharded, and a head, which the root has. Throws
/// after the first MLP when told to.
struct NetImpl : torch::nn::Module {
  NetImpl() : head(register_module("head", linear(6, 3))) {
    for (int i = 0; i < 3; ++i) {
      mlps.push_back(register_module("mlp" + std::to_string(i), MLP(6)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& mlp : mlps) {
      x = x + mlp(x);
      TORCH_CHECK(!fail, "as asked");
    }
    return head(x);
  }
  std::vector<MLP> mlps;
  Linear head;
  bool fail = false;
};
FSDP_MODULE(Net);

inline Net sharded_net(const ReshardAfterForward& reshard = {}) {
  auto net = seeded<Net>();
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, {.reshard_after_forward = reshard});
  }
  fully_shard(net, {.reshard_after_forward = reshard});
  return net;
}

inline torch::Tensor loss_of(Net& net, int step) {
  return net(random_batch(step, {4, 6}).to(net->head->weight.scalar_type())).pow(2).sum();
}

} // namespace fsdp::test
