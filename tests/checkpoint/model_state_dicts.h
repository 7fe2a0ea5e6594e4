#pragma once

// A nested model, and what the state dict of a model is compared with.

#include "checkpoint/state_dicts.h"

namespace fsdp::test {

struct PairImpl : torch::nn::Module {
  explicit PairImpl(int64_t dim)
      : first(register_module("0", MLP(dim))), second(register_module("1", linear(dim, dim))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return second(first(x));
  }
  MLP first;
  Linear second;
};
FSDP_MODULE(Pair);

/// Upstream's: Sequential(MLP, Sequential(MLP, Linear), MLP).
struct NestedImpl : torch::nn::Module {
  explicit NestedImpl(int64_t dim)
      : first(register_module("0", MLP(dim))),
        second(register_module("1", Pair(dim))),
        third(register_module("2", MLP(dim))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return third(second(first(x)));
  }
  MLP first;
  Pair second;
  MLP third;
};
FSDP_MODULE(Nested);

inline void shard(Nested& net, const FullyShardOptions& options) {
  fully_shard(net->first, options);
  fully_shard(net->second, options);
  fully_shard(net->third, options);
  fully_shard(net, options);
}

inline void shard(MLPStack& net, const FullyShardOptions& options) {
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, options);
  }
  fully_shard(net, options);
}

/// What Python's state_dict() of an unsharded model gives.
inline StateDict plain_state(const torch::nn::Module& module) {
  StateDict state;
  for (const auto& item : module.named_parameters()) {
    state.insert(item.key(), item.value().detach().clone());
  }
  return state;
}

inline void expect_full(const StateDict& state, const StateDict& expected) {
  ASSERT_EQ(state.keys(), expected.keys());
  for (const auto& [key, value] : state) {
    SCOPED_TRACE(key);
    const auto* placed = std::get_if<DTensor>(&value);
    EXPECT_SAME(placed ? placed->full_tensor() : local_of(value), local_of(expected.at(key)));
  }
}

} // namespace fsdp::test
