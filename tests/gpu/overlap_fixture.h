#pragma once

// Models whose compute and communication take as long as they are told, on one
// rank of a fake world: what is measured is the order that the engine gives its
// streams, and nothing else.

#include "support/gpu.h"
#include "support/sharded.h"

namespace fsdp::test {

/// A rank of a fake world of two, with a stream of its own; the clock is known.
struct OneOfTwo {
  OneOfTwo() {
    gpu_sleep(0);
  }
  ScopedProcessGroup joined{{.backend = "fake", .rank = 0, .world_size = 2}};
  OwnStream own;
};

/// A layer that computes for `ms` in forward and twice as long in backward.
struct SleepyImpl : torch::nn::Module {
  explicit SleepyImpl(double ms)
      : weight(register_parameter("weight", torch::randn({4, 4}))), ms(ms) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return SleepFunction::apply(torch::relu(x.matmul(weight)), ms, 2 * ms);
  }
  torch::Tensor weight;
  double ms;
};
FSDP_MODULE(Sleepy);

struct SleepyStackImpl : torch::nn::Module {
  SleepyStackImpl(int64_t depth, double ms) {
    for (int64_t i = 0; i < depth; ++i) {
      layers.push_back(register_module(std::to_string(i), Sleepy(ms)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) {
      x = layer(x);
    }
    return x;
  }
  std::vector<Sleepy> layers;
};
FSDP_MODULE(SleepyStack);

/// Such a stack, one group per layer, with what delays its collectives: for placed
/// gathers LateGathers does.
struct DelayedStack {
  DelayedStack(
      int64_t depth,
      double compute_ms,
      const DeviceMesh& mesh,
      bool placed = false,
      const MixedPrecisionPolicy& precision = {})
      : net(depth, compute_ms),
        gather(std::make_shared<DelayedAllGather>()),
        scatter(std::make_shared<DelayedReduceScatter>()) {
    for (auto& layer : net->layers) {
      layers.push_back(fully_shard(
          layer, {.mesh = mesh, .reshard_after_forward = true, .mp_policy = precision}));
      if (!placed) {
        layers.back().set_custom_all_gather(gather);
      }
      layers.back().set_custom_reduce_scatter(scatter);
    }
    fully_shard(net, {.mesh = mesh, .reshard_after_forward = true});
    x = torch::randn({2, 4}, gpu()).set_requires_grad(true);
  }

  double forward_ms() {
    return median_gpu_ms([&] { net(x); });
  }
  /// Of a backward whose forward is over.
  double backward_ms() {
    std::vector<double> times;
    for (int i = 0; i < 4; ++i) {
      const auto loss = net(x).sum();
      times.push_back(gpu_ms([&] { loss.backward(); }));
    }
    std::sort(times.begin() + 1, times.end()); // the first warms up
    return times[2];
  }

  SleepyStack net;
  std::shared_ptr<DelayedAllGather> gather;
  std::shared_ptr<DelayedReduceScatter> scatter;
  std::vector<FSDPModule> layers;
  torch::Tensor x;
};

inline testing::AssertionResult between(double value, double low, double high) {
  return value > low && value < high ? testing::AssertionSuccess()
                                     : testing::AssertionFailure()
                                           << value << " ms, expected between " << low << " and "
                                           << high;
}

} // namespace fsdp::test
