#pragma once

#include <fsdp/float8.h>

#include <vector>

#include "support/sharded.h"

namespace fsdp::test {

inline const std::vector<Float8Scaling> kScalings{
    Float8Scaling::tensorwise, Float8Scaling::rowwise};

// Multiples of 16, which GPUs need, also after two ranks of tensor parallelism have divided the
// second one. Over three ranks its shards are uneven.
inline constexpr int64_t kDim = 48;
inline constexpr int64_t kHidden = 64;

/// Two layers.
struct PairImpl : torch::nn::Module {
  explicit PairImpl(Float8Scaling scaling, int64_t hidden = kHidden)
      : up(register_module("up", layer(kDim, hidden, scaling))),
        down(register_module("down", layer(hidden, kDim, scaling))) {}
  static nn::Float8Linear layer(int64_t in, int64_t out, Float8Scaling scaling) {
    return nn::Float8Linear(torch::nn::LinearOptions(in, out), scaling);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return x + down(torch::gelu(up(x)));
  }
  nn::Float8Linear up, down;
};
FSDP_MODULE(Pair);

inline void send_in_float8(Pair& net, Float8Scaling scaling) {
  for (const auto& weight : {net->up->weight, net->down->weight}) {
    set_all_gather_extension(weight, float8_all_gather(scaling));
  }
}

} // namespace fsdp::test
