#pragma once

// Helpers that compare sharded models with unsharded ones, on every rank.

#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/distributed.h>
#include <fsdp/fully_shard.h>
#include <fsdp/param.h>

#include <mutex>
#include <utility>

#include "param/fsdp_param.h"
#include "param/tensor_piece.h"
#include "support/device.h"
#include "support/models.h"
#include "support/ranks.h"
#include "support/tensors.h"

namespace fsdp::test {

/// Guards torch's default generator, which ranks share if they are threads. A static variable of
/// the template below would not do, because each module type would have its own.
inline std::mutex default_generator_mutex;

/// Makes a module that has the same values on every rank.
template <class Holder, class... Args>
Holder seeded(const Args&... args) {
  std::lock_guard lock(default_generator_mutex);
  torch::manual_seed(42);
  Holder module(args...);
  to_test_device(*module);
  return module;
}

/// Makes two models with the same values. One is to be sharded and compared with the other.
template <class Holder, class... Args>
std::pair<Holder, Holder> twins(const Args&... args) {
  return {seeded<Holder>(args...), seeded<Holder>(args...)};
}

inline at::Generator generator(uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

/// A batch that differs between ranks and between steps.
inline torch::Tensor random_batch(int step, at::IntArrayRef sizes) {
  return torch::randn(sizes, generator(1000 * step + get_rank())).to(test_device());
}
inline torch::Tensor random_tokens(int step, at::IntArrayRef sizes, int64_t vocab_size) {
  return torch::randint(vocab_size, sizes, generator(1000 * step + get_rank()), torch::kLong)
      .to(test_device());
}

/// A chain of MLPs.
struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t dim, int64_t depth = 3) {
    for (int64_t i = 0; i < depth; ++i) {
      mlps.push_back(register_module(std::to_string(i), MLP(dim)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& mlp : mlps) {
      x = mlp(x);
    }
    return x;
  }
  std::vector<MLP> mlps;
};
FSDP_MODULE(Stack);

/// The part of `whole` that this rank holds of the sharded `param`.
inline torch::Tensor part_of(const torch::Tensor& whole, const torch::Tensor& param) {
  const auto spread = as_dtensor(param);
  const auto& mesh = spread.device_mesh();
  const std::vector<Placement> replicated(mesh.ndim(), Replicate{});
  return DTensor::from_local(whole, mesh, replicated).redistribute(spread.placements()).to_local();
}

inline testing::AssertionResult near(
    const torch::Tensor& actual, const torch::Tensor& expected, double tolerance) {
  if (actual.sizes() != expected.sizes() || actual.scalar_type() != expected.scalar_type()) {
    return testing::AssertionFailure()
           << "got " << actual.scalar_type() << actual.sizes() << ", expected "
           << expected.scalar_type() << expected.sizes();
  }
  return torch::allclose(actual, expected, tolerance, tolerance)
             ? testing::AssertionSuccess()
             : testing::AssertionFailure() << "got " << actual << "\nexpected " << expected;
}

inline torch::Tensor transformer_loss(Transformer& net, int step) {
  return net(random_tokens(step, {2, 16}, net->args.vocab_size)).sum();
}

/// Makes a group of each block, and one of the rest.
inline void shard_transformer(Transformer& net, const FullyShardOptions& options = {}) {
  for (auto& block : net->blocks) {
    fully_shard(block, options);
  }
  fully_shard(net, options);
}

/// Expects that each parameter and gradient of `sharded` is this rank's part of the one of
/// `reference`. Those that fully_shard does not manage must be equal.
inline void expect_parity(
    const torch::nn::Module& sharded, const torch::nn::Module& reference, double tolerance = 1e-5) {
  const auto expected = reference.named_parameters();
  const auto actual = sharded.named_parameters();
  ASSERT_EQ(actual.keys(), expected.keys());
  for (const auto& item : actual) {
    const auto& whole = expected[item.key()];
    const bool managed =
        detail::FSDPParam::find(item.value()) || detail::TensorPiece::find(item.value());
    const auto part = [&](const torch::Tensor& tensor) { // where the parameter is, if offloaded
      return (managed ? part_of(tensor, item.value()) : tensor).to(item.value().device());
    };
    const auto local = managed ? as_dtensor(item.value()).to_local() : item.value().detach();
    EXPECT_TRUE(near(local, part(whole.detach()), tolerance)) << item.key();
    ASSERT_EQ(item.value().grad().defined(), whole.grad().defined()) << item.key();
    if (whole.grad().defined()) {
      EXPECT_TRUE(near(item.value().grad(), part(whole.grad()), tolerance))
          << "gradient of " << item.key();
      EXPECT_TRUE(item.value().grad().is_contiguous());
    }
  }
}

inline void average_gradients(const torch::nn::Module& module) {
  for (const auto& param : unique_parameters(module)) {
    if (param.grad().defined()) {
      default_group().all_reduce(param.grad(), ReduceOp::Avg);
    }
  }
}

/// Runs forward and backward of both models, and compares the losses, `loss_of(net, step)`.
template <class Holder, class Loss>
void compare_backward(Holder& sharded, Holder& reference, Loss loss_of, int step) {
  auto loss = loss_of(sharded, step);
  auto expected = loss_of(reference, step);
  EXPECT_TRUE(near(loss.detach(), expected.detach(), 1e-5));
  loss.backward();
  expected.backward();
}

/// Compares the gradients. Then both optimizers make a step, and the gradients are dropped.
template <class Holder, class Optimizer>
void compare_and_step(
    Holder& sharded,
    Holder& reference,
    Optimizer& sharded_optimizer,
    Optimizer& optimizer,
    bool set_to_none) {
  average_gradients(*reference);
  expect_parity(*sharded, *reference);
  sharded_optimizer.step();
  optimizer.step();
  sharded_optimizer.zero_grad(set_to_none);
  optimizer.zero_grad(set_to_none);
}

/// Trains both models side by side. `loss_of(net, step)` is the loss of the calling rank.
template <class Holder, class Loss>
void train_and_compare(Holder& sharded, Holder& reference, Loss loss_of, int steps = 5) {
  torch::optim::AdamW sharded_optimizer(unique_parameters(*sharded), 1e-2);
  torch::optim::AdamW optimizer(unique_parameters(*reference), 1e-2);
  for (int step = 0; step < steps; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    compare_backward(sharded, reference, loss_of, step);
    compare_and_step(sharded, reference, sharded_optimizer, optimizer, step % 2 == 0);
    expect_parity(*sharded, *reference);
  }
}

} // namespace fsdp::test
