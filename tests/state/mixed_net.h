#pragma once

#include "support/ranks.h"
#include "support/sharded.h"

namespace fsdp::test {

/// Parameters that belong to the root's group, used in several ways.
struct MixedImpl : torch::nn::Module {
  MixedImpl()
      : inner(register_module("inner", MLP(6))),
        head(register_module("head", linear(6, 5))),
        plain(register_module("plain", torch::nn::Linear(6, 6))),
        scale(register_parameter("scale", torch::full({2}, 1.5))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = plain(around ? inner->as<MLPImpl>()->forward(x) : inner(x));
    if (hook && h.requires_grad()) {
      h.register_hook(hook);
    }
    return head(h) * scale.mean();
  }
  torch::Tensor loss(const torch::Tensor& x) {
    return head(x).sum();
  }
  MLP inner;
  Linear head;
  torch::nn::Linear plain;
  torch::Tensor scale;
  bool around = false;
  std::function<void(torch::Tensor)> hook;
};
FSDP_MODULE(Mixed);

inline torch::Tensor mixed_loss(Mixed& net, int step) {
  return net(random_batch(step, {3, 6})).pow(2).sum();
}

/// Trains a sharded model beside an unsharded one, with parameters that forward frees or keeps.
template <class Loss>
void train_mixed(int num_ranks, const Loss& loss) {
  for (const bool reshard : {false, true}) {
    run_ranks(num_ranks, [&](int) {
      SCOPED_TRACE_OF(reshard);
      auto [net, reference] = twins<Mixed>();
      fully_shard(net->inner, {.reshard_after_forward = reshard});
      fully_shard(net, {.reshard_after_forward = reshard});
      train_and_compare(net, reference, loss);
    });
  }
}

} // namespace fsdp::test
