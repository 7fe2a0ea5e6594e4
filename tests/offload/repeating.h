#pragma once

// A model whose layers run several times, and an optimizer that can be watched.

#include "support/sharded.h"

namespace fsdp::test {

/// Runs each of its layers twice, and leaves the last one out of odd steps.
struct RepeatingImpl : torch::nn::Module {
  RepeatingImpl() {
    for (int i = 0; i < 3; ++i) {
      mlps.push_back(register_module("mlp" + std::to_string(i), MLP(6)));
    }
    head = register_module("head", linear(6, 3));
  }
  torch::Tensor forward(torch::Tensor x, int step) {
    for (int round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < mlps.size() - step % 2; ++i) {
        x = x + mlps[i](x);
        if (in_backward && i == 0) {
          x.register_hook([this](torch::Tensor) { in_backward(); });
        }
      }
    }
    return head(x);
  }
  std::vector<MLP> mlps;
  Linear head{nullptr};
  int rounds = 2;
  std::function<void()> in_backward; // called before the backward of the first layer
};
FSDP_MODULE(Repeating);

inline torch::Tensor repeating_loss(Repeating& net, int step) {
  return net(random_batch(step, {4, 6}), step).pow(2).sum();
}

inline void shard_repeating(Repeating& net, const FullyShardOptions& options) {
  for (auto& mlp : net->mlps) {
    fully_shard(mlp, options);
  }
  fully_shard(net, options);
}

/// Steps as torch's SGD does, and calls a function before it.
struct WatchedSGD : torch::optim::SGD {
  WatchedSGD(std::vector<torch::Tensor> params, std::function<void()> before)
      : SGD(std::move(params), 0.1), before(std::move(before)) {}
  torch::Tensor step(LossClosure closure = nullptr) override {
    before();
    return SGD::step(std::move(closure));
  }
  std::function<void()> before;
};

/// Compares the parameters of two sharded models. The first one must have no gradients left.
template <class Holder>
void expect_same_values(const Holder& actual, const Holder& expected) {
  const auto others = expected->named_parameters();
  for (const auto& item : actual->named_parameters()) {
    EXPECT_SAME(item.value(), others[item.key()]) << item.key();
    EXPECT_FALSE(item.value().grad().defined()) << item.key();
  }
}

} // namespace fsdp::test
