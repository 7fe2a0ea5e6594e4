// CUDA graphs: upstream's test_two_layer_fully_shard_cudagraph. A forward and
// a backward of a sharded model are captured once and replayed with new inputs.
#include <fsdp/optim.h>

#include <algorithm>
#include <array>

#include "runtime/stream.h"
#include "support/gpu.h"
#include "support/nccl_ranks.h"
#include "support/sharded.h"
#ifdef FSDP_TEST_CUDA
#include <ATen/cuda/CUDAGraph.h>
#endif

namespace fsdp {
namespace {

using namespace test;

#ifdef FSDP_TEST_CUDA
torch::Tensor loss_of(Stack& net, const torch::Tensor& x) {
  return net(x).to(torch::kFloat).pow(2).sum();
}

/// The milliseconds of one call: the median of several.
template <class Call>
double ms_per_call(const Call& call) {
  std::array<double, 5> times{};
  for (auto& ms : times) {
    torch::cuda::synchronize();
    const auto start = std::chrono::steady_clock::now();
    call();
    torch::cuda::synchronize();
    ms = host_ms_since(start);
  }
  std::ranges::sort(times);
  return times[times.size() / 2];
}

testing::AssertionResult close(const torch::Tensor& actual, const torch::Tensor& expected) {
  const auto difference = (actual - expected).norm().item<double>();
  const auto size = expected.norm().item<double>();
  return difference <= 1e-5 * size
             ? testing::AssertionSuccess()
             : testing::AssertionFailure() << "differs by " << difference << " of " << size;
}

/// Trains one model by a graph and another, sharded in the same way, without one.
void train_by_replays(const DeviceMesh& mesh, bool low_precision) {
  constexpr int64_t kDim = 64;
  const int64_t depth = mesh.size() == 1 ? 8 : 3; // kernels of ranks that share a GPU take turns
  auto [net, eager] = twins<Stack>(kDim, depth);
  FullyShardOptions options{.mesh = mesh};
  if (low_precision) {
    options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  }
  for (auto* each : {&net, &eager}) {
    for (auto& mlp : (*each)->mlps) {
      fully_shard(mlp, options);
    }
    fully_shard(*each, options);
  }
  const OwnStream own; // a graph cannot be captured on the default stream
  const auto device = detail::current_device(torch::kCUDA);
  const auto x = random_batch(0, {4, kDim}).to(device);
  const auto step = [&x](Stack& model) {
    const auto loss = loss_of(model, x);
    loss.backward();
    return loss.detach();
  };
  for (int i = 0; i < 3; ++i) { // buffers and streams are made in the first steps
    step(net);
    net->zero_grad();
  }
  const auto eager_ms = ms_per_call([&] { step(eager); });
  at::cuda::CUDAGraph graph;
  // NCCL's watchdog asks for events meanwhile, in a thread of its own.
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  const auto loss = step(net);
  graph.capture_end();
  optim::SGD optimizer(net->parameters(), 0.05);
  optim::SGD eager_optimizer(eager->parameters(), 0.05);
  const auto eager_params = eager->named_parameters();
  for (int i = 1; i < 5; ++i) {
    SCOPED_TRACE_OF(i);
    x.copy_(random_batch(i, {4, kDim}));
    // A graph that read memory of the host which is free by now would read these numbers.
    for (int64_t numel = 8; numel < (1 << 16); numel *= 2) {
      torch::full({numel}, -1, torch::kLong).pin_memory();
    }
    graph.replay();
    eager->zero_grad();
    EXPECT_TRUE(close(loss, step(eager)));
    for (const auto& item : net->named_parameters()) {
      const auto& expected = eager_params[item.key()];
      EXPECT_TRUE(close(item.value().grad(), expected.grad())) << item.key();
      EXPECT_TRUE(close(as_dtensor(item.value()).to_local(), as_dtensor(expected).to_local()))
          << item.key();
    }
    optimizer.step(); // outside of the graph; the next replay gathers the new shards
    eager_optimizer.step();
  }
  // The model also works without the graph, between replays.
  torch::NoGradGuard no_grad;
  EXPECT_TRUE(close(loss_of(net, x), loss_of(eager, x)));
  const auto replay_ms = ms_per_call([&] { graph.replay(); });
  if (get_rank() == 0) {
    figure(
        "%ld ranks, %s, %ld layers: forward and backward %.2f ms, replayed %.2f ms",
        static_cast<long>(mesh.size()), low_precision ? "bf16" : "fp32", static_cast<long>(depth),
        eager_ms, replay_ms);
  }
}

using NcclGraphs = NcclRanks;

TEST(GraphOnGpu, ReplaysAForwardAndABackward) {
  SKIP_WITHOUT_GPU();
  for (const bool low_precision : {false, true}) {
    SCOPED_TRACE_OF(low_precision);
    const ScopedProcessGroup joined({.backend = "fake", .rank = 0, .world_size = 1});
    train_by_replays(init_device_mesh(torch::kCUDA, {1}), low_precision);
  }
}

TEST_F(NcclGraphs, ReplayAForwardAndABackward) {
  const int ranks = get_world_size();
  const std::vector<DeviceMesh> meshes{
      init_device_mesh(torch::kCUDA, {ranks}),
      init_device_mesh(torch::kCUDA, {2, ranks / 2}, {"dp_replicate", "dp_shard"})};
  for (const auto& mesh : meshes) {
    for (const bool low_precision : {false, true}) {
      for (const auto place : {detail::PlaceGathers::Never, detail::PlaceGathers::Always}) {
        SCOPED_TRACE(place == detail::PlaceGathers::Always ? "placed" : "not placed");
        SCOPED_TRACE_OF(low_precision);
        SCOPED_TRACE(mesh.ndim() == 2 ? "replicas" : "shards");
        const PlacedGathers placed(place);
        train_by_replays(mesh, low_precision);
      }
    }
  }
}
#else
TEST(GraphOnGpu, ReplaysAForwardAndABackward) {
  GTEST_SKIP() << "this torch has no CUDA";
}
#endif

} // namespace
} // namespace fsdp
