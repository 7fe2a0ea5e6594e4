#pragma once

#include "support/sharded.h"

namespace fsdp::test {

inline torch::Tensor leaf(at::IntArrayRef sizes, uint64_t seed = 1) {
  return torch::randn(sizes, generator(seed)).to(test_device()).set_requires_grad(true);
}

/// Gradients of what `run` returns, summed up, for each of `of`.
template <class Run>
std::vector<torch::Tensor> gradients(const std::vector<torch::Tensor>& of, Run run) {
  return torch::autograd::grad(
      {run().sum()}, of, {}, /*retain_graph=*/false, /*create_graph=*/false,
      /*allow_unused=*/true);
}

inline void expect_same(
    const std::vector<torch::Tensor>& actual, const std::vector<torch::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << i;
    if (actual[i].defined()) {
      EXPECT_SAME(actual[i], expected[i]);
    }
  }
}

} // namespace fsdp::test
