#pragma once

#include "support/sharded.h"

namespace fsdp::test {

inline Transformer make_transformer(
    int64_t layers, const ReshardAfterForward& reshard, bool weight_tying = true) {
  auto net = seeded<Transformer>(
      ModelArgs{.n_layers = layers, .dropout_p = 0, .weight_tying = weight_tying});
  for (auto& block : net->blocks) {
    fully_shard(block, {.reshard_after_forward = reshard});
  }
  fully_shard(net, {.reshard_after_forward = reshard});
  return net;
}

inline torch::Tensor loss_of(Transformer& net, int step = 0) {
  return net(random_tokens(step, {2, 16}, 8)).sum();
}

struct Reshard {
  ReshardAfterForward value;
  std::string name;
};
inline const std::vector<Reshard> kReshards{
    {true, "true"}, {false, "false"}, {2, "2"}, {std::nullopt, "auto"}};

} // namespace fsdp::test
