// CUDA graphs: upstream's test_two_layer_fully_shard_cudagraph. A forward and
// a backward of a sharded model are captured once and replayed with new inputs.
#include "support/gpu.h"
#include "support/sharded.h"
#ifdef FSDP_TEST_CUDA
#include <ATen/cuda/CUDAGraph.h>
#endif

namespace fsdp {
namespace {

using namespace test;

#ifdef FSDP_TEST_CUDA
TEST(GraphOnGpu, ReplaysAForwardAndABackwardOfTwoLayers) {
  SKIP_WITHOUT_GPU();
  for (const bool low_precision : {false, true}) {
    SCOPED_TRACE_OF(low_precision);
    const ScopedProcessGroup joined({.backend = "fake", .rank = 0, .world_size = 1});
    auto [net, reference] = twins<Stack>(16, 2);
    FullyShardOptions options{.mesh = init_device_mesh(torch::kCUDA, {1})};
    if (low_precision) {
      options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    }
    reference->to(torch::kCUDA);
    for (auto& mlp : net->mlps) {
      fully_shard(mlp, options);
    }
    fully_shard(net, options);
    const OwnStream own; // a graph cannot be captured on the default stream
    const auto x = random_batch(0, {4, 16}).cuda();
    for (int i = 0; i < 3; ++i) { // what is made once must not be part of it
      net(x).to(torch::kFloat).pow(2).sum().backward();
      net->zero_grad();
    }
    torch::cuda::synchronize();
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    const auto loss = net(x).to(torch::kFloat).pow(2).sum();
    loss.backward();
    graph.capture_end();
    for (int step = 1; step < 4; ++step) {
      const auto batch = random_batch(step, {4, 16}).cuda();
      x.copy_(batch);
      graph.replay();
      torch::cuda::synchronize();
      reference->zero_grad();
      reference(batch).pow(2).sum().backward();
      const auto expected = reference->named_parameters();
      for (const auto& item : net->named_parameters()) {
        EXPECT_TRUE(
            near(item.value().grad(), expected[item.key()].grad(), low_precision ? 0.1 : 1e-4))
            << item.key();
      }
    }
  }
}
#else
TEST(GraphOnGpu, ReplaysAForwardAndABackwardOfTwoLayers) {
  GTEST_SKIP() << "this torch has no CUDA";
}
#endif

} // namespace
} // namespace fsdp
