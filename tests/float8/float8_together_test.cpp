// Linear layers in float8 together with what else a model may use.
#include <fsdp/activation_checkpointing.h>
#include <fsdp/save_policy.h>
#include <fsdp/tensor_parallel.h>

#include "float8/float8.h"
#include "float8/pair.h"

namespace fsdp {
namespace {

using namespace test;

torch::Tensor loss_of(Pair& net, int step) {
  return net(random_batch(step, {3, 5, kDim})).square().mean();
}

/// Their scales are beyond the range of fp16.
TEST(Float8, SmallValuesOfFp16) {
  auto values = torch::randn({32, 16}, generator(1)).mul(1e-3).to(test_device(), torch::kHalf);
  for (const auto& shared : std::vector<std::optional<int64_t>>{{}, 0, 1}) {
    for (const auto dtype : {torch::kFloat8_e4m3fn, torch::kFloat8_e5m2}) {
      const auto rounded = detail::to_float8(values, shared, dtype);
      const auto error = detail::from_float8(rounded, torch::kFloat) - values.to(torch::kFloat);
      EXPECT_LT((error.norm() / values.to(torch::kFloat).norm()).item<double>(), 0.08);
      const auto zeros = detail::to_float8(torch::zeros_like(values), shared, dtype);
      EXPECT_EQ(zeros.data.to(torch::kFloat).abs().max().item<double>(), 0);
    }
  }
}

TEST(Float8AllGather, UnderActivationCheckpointing) {
  run_ranks(2, [](int) {
    for (const auto scaling : kScalings) {
      for (const bool saves : {false, true}) {
        SCOPED_TRACE_OF(saves);
        auto [net, reference] = twins<Pair>(scaling);
        ActivationCheckpointOptions options;
        options.save = saves ? save_matmuls() : nullptr;
        apply_activation_checkpointing(net, options);
        fully_shard(net);
        send_in_float8(net, scaling);
        train_and_compare(net, reference, loss_of);
      }
    }
  });
}

TEST(Float8AllGather, OfEmptyShards) {
  run_ranks(5, [](int) {
    for (const auto scaling : kScalings) {
      auto [net, reference] = twins<Pair>(scaling, 3);
      fully_shard(net);
      send_in_float8(net, scaling);
      train_and_compare(net, reference, loss_of);
    }
  });
}

TEST(Float8AllGather, OffloadedAndFrozen) {
  run_ranks(2, [](int) {
    for (const auto scaling : kScalings) {
      auto [net, reference] = twins<Pair>(scaling);
      net->up->weight.set_requires_grad(false);
      reference->up->weight.set_requires_grad(false);
      fully_shard(net, {.offload_policy = CPUOffloadPolicy{}});
      send_in_float8(net, scaling);
      train_and_compare(net, reference, loss_of);
    }
  });
}

TEST(Float8AllGather, WhileGradientsAreAccumulated) {
  run_ranks(3, [](int) {
    for (const auto scaling : kScalings) {
      for (const bool reshard : {true, false}) {
        SCOPED_TRACE_OF(reshard);
        auto [net, reference] = twins<Pair>(scaling);
        auto root = fully_shard(net, {.reshard_after_forward = reshard});
        send_in_float8(net, scaling);
        for (int step = 0; step < 3; ++step) {
          root.set_requires_gradient_sync(step == 2);
          loss_of(net, step).backward();
          loss_of(reference, step).backward();
        }
        average_gradients(*reference);
        expect_parity(*net, *reference);
      }
    }
  });
}

/// A part of a matrix has a scale of its own, which is a power of two. So it gives the same values.
/// A GPU rounds sums, which tensor parallelism divides in another way. After that, some gradients
/// are rounded to the next value of float8.
TEST(Float8AllGather, WithReplicasAndTensorParallelism) {
  const auto expect_close = [](const torch::Tensor& actual, const torch::Tensor& expected) {
    if (test_device() == torch::kCPU) {
      EXPECT_TRUE(near(actual, expected, 1e-5));
      return;
    }
    ASSERT_EQ(actual.sizes(), expected.sizes());
    EXPECT_LT((actual - expected).norm().item<double>(), 5e-2 * expected.norm().item<double>());
  };
  run_ranks(8, [&](int) {
    const auto mesh = init_device_mesh(test_device(), {2, 2, 2}, {"dp", "shard", "tp"});
    for (const auto scaling : kScalings) {
      auto [net, reference] = twins<Pair>(scaling);
      parallelize_module(net, mesh["tp"], {{"up", ColwiseParallel{}}, {"down", RowwiseParallel{}}});
      fully_shard(net, {.mesh = mesh[{"dp", "shard"}]});
      send_in_float8(net, scaling);
      const auto x = random_batch(0, {6, kDim});
      default_group().all_reduce(x, ReduceOp::Avg); // the same on all ranks
      const auto result = net(x);
      const auto expected = reference(x);
      expect_close(result.detach(), expected.detach());
      result.square().mean().backward();
      expected.square().mean().backward();
      const auto grad = part_of(reference->up->weight.grad(), net->up->weight);
      expect_close(net->up->weight.grad(), grad);
    }
  });
}

} // namespace
} // namespace fsdp
