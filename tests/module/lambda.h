#pragma once

#include "support/sharded.h"

namespace fsdp::test {

/// A module whose forward is a function of its one Linear and its input.
struct LambdaImpl : torch::nn::Module {
  using Body = std::function<std::vector<torch::Tensor>(Linear&, torch::Tensor)>;
  explicit LambdaImpl(Body body, int64_t dim = 6)
      : body(std::move(body)), lin(register_module("lin", linear(dim, dim))) {}
  std::vector<torch::Tensor> forward(torch::Tensor x) {
    return body(lin, std::move(x));
  }
  Body body;
  Linear lin;
};
FSDP_MODULE(Lambda);

/// What a Lambda takes.
inline torch::Tensor lambda_input() {
  return random_batch(0, {2, 6}).set_requires_grad(true);
}

} // namespace fsdp::test
