// Communication behind compute: FSDP2's overlap tests, as relations between
// times of one run. Each delay is long beside what a kernel or a call takes.
#include "gpu/overlap_fixture.h"

namespace fsdp {
namespace {

using namespace test;

constexpr double kCompute = 30; // ms
constexpr double kComm = 20;
constexpr int64_t kLayers = 3;

class OverlapOnGpu : public testing::TestWithParam<int> {};

/// How many groups ahead each layer asks for, in both directions; 0: as the
/// engine does by itself.
void prefetch(DelayedStack& stack, int ahead) {
  const auto n = static_cast<int>(stack.layers.size());
  for (int i = 0; ahead > 0 && i < n; ++i) {
    std::vector<FSDPModule> next;
    std::vector<FSDPModule> previous;
    for (int k = 1; k <= ahead; ++k) {
      if (i + k < n) {
        next.push_back(stack.layers[i + k]);
      }
      if (i - k >= 0) {
        previous.push_back(stack.layers[i - k]);
      }
    }
    stack.layers[i].set_modules_to_forward_prefetch(next);
    stack.layers[i].set_modules_to_backward_prefetch(previous);
  }
}

TEST_P(OverlapOnGpu, ForwardShowsTheFirstGatherOnly) {
  SKIP_WITHOUT_GPU();
  const OneOfTwo world;
  DelayedStack stack(kLayers, kCompute, init_device_mesh(torch::kCUDA, {2}));
  prefetch(stack, GetParam());
  const double alone = stack.forward_ms();
  const double comm = median_gpu_ms([] { gpu_sleep(kComm); });
  stack.gather->before_ms = kComm;
  const double both = stack.forward_ms();
  figure(
      "forward of %ld layers, prefetch %d: compute %.1f ms, each gather %.1f ms, together %.1f ms "
      "(in series %.1f)",
      kLayers, GetParam(), alone, comm, both, alone + kLayers * comm);
  EXPECT_TRUE(between(both - alone, 0.6 * comm, 1.6 * comm));
}

TEST_P(OverlapOnGpu, BackwardShowsTheFirstGatherAndTheLastReduction) {
  SKIP_WITHOUT_GPU();
  const OneOfTwo world;
  DelayedStack stack(kLayers, kCompute, init_device_mesh(torch::kCUDA, {2}));
  prefetch(stack, GetParam());
  const double alone = stack.backward_ms();
  const double comm = median_gpu_ms([] { gpu_sleep(kComm); });
  stack.gather->before_ms = kComm;
  stack.scatter->before_ms = kComm;
  const double both = stack.backward_ms();
  figure(
      "backward of %ld layers, prefetch %d: compute %.1f ms, each collective %.1f ms, together "
      "%.1f ms (in series %.1f)",
      kLayers, GetParam(), alone, comm, both, alone + 2 * kLayers * comm);
  EXPECT_TRUE(between(both - alone, 1.5 * comm, 2.8 * comm));
}

// Two buffers that take turns are enough for the same.
TEST_P(OverlapOnGpu, PlacedGathersHideAsWell) {
  SKIP_WITHOUT_GPU();
  const OneOfTwo world;
  const PlacedGathers always(detail::PlaceGathers::Always);
  DelayedStack stack(kLayers, kCompute, init_device_mesh(torch::kCUDA, {2}), /*placed=*/true);
  prefetch(stack, GetParam());
  LateGathers late;
  const double forward_alone = stack.forward_ms();
  const double backward_alone = stack.backward_ms();
  const double comm = median_gpu_ms([] { gpu_sleep(kComm); });
  EXPECT_GT(late.num_placed, 0);
  late.ms = kComm;
  stack.scatter->before_ms = kComm;
  const double forward = stack.forward_ms();
  const double backward = stack.backward_ms();
  figure(
      "placed, %ld layers, prefetch %d: forward %.1f ms, with gathers of %.1f ms %.1f ms; backward "
      "%.1f ms, with gathers and reductions %.1f ms",
      kLayers, GetParam(), forward_alone, comm, forward, backward_alone, backward);
  EXPECT_TRUE(between(forward - forward_alone, 0.6 * comm, 1.6 * comm));
  EXPECT_TRUE(between(backward - backward_alone, 1.5 * comm, 2.8 * comm));
}

INSTANTIATE_TEST_SUITE_P(
    Prefetch, OverlapOnGpu, testing::Values(0, 1, 2), testing::PrintToStringParamName());

// Where communication takes longer than compute it is what is seen, once.
TEST(OverlapTimesOnGpu, SlowCommunicationHidesCompute) {
  SKIP_WITHOUT_GPU();
  const OneOfTwo world;
  DelayedStack stack(kLayers, kCompute / 3, init_device_mesh(torch::kCUDA, {2}));
  const double alone = stack.forward_ms();
  stack.gather->before_ms = 2 * kComm;
  const double both = stack.forward_ms();
  const double comm = median_gpu_ms([] { gpu_sleep(2 * kComm); });
  // All gathers in a row, and the last layer's compute.
  EXPECT_TRUE(between(both, kLayers * comm, kLayers * comm + 0.7 * alone));
}

struct BehindAnotherImpl : torch::nn::Module {
  BehindAnotherImpl()
      : first(register_module("first", Sleepy(kCompute))),
        second(register_module("second", linear(4, 4))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return second(first(x));
  }
  Sleepy first; // not sharded
  Linear second;
};
TORCH_MODULE(BehindAnother);

TEST(OverlapTimesOnGpu, APostOptimEventLetsTheFirstGatherBegin) {
  SKIP_WITHOUT_GPU();
  constexpr int kSteps = 5;
  const OneOfTwo world;
  BehindAnother net;
  net->to(torch::kCUDA);
  auto root = fully_shard(
      net->second, {.mesh = init_device_mesh(torch::kCUDA, {2}), .reshard_after_forward = false});
  const auto gather = std::make_shared<DelayedAllGather>();
  gather->before_ms = kComm;
  root.set_custom_all_gather(gather);
  torch::optim::SGD optimizer(net->parameters(), 1e-2);
  const auto x = torch::randn({2, 4}, gpu());
  const auto train = [&](bool with_event) {
    return [&, with_event] {
      for (int step = 0; step < kSteps; ++step) {
        net(x).sum().backward();
        optimizer.step();
        optimizer.zero_grad();
        if (with_event) {
          c10::Event event(torch::kCUDA);
          event.record(gpu_stream());
          root.set_post_optim_event(std::move(event));
        }
      }
    };
  };
  const double without = median_gpu_ms(train(false));
  const double with = median_gpu_ms(train(true));
  const double comm = median_gpu_ms([] { gpu_sleep(kComm); });
  figure(
      "%d steps: %.1f ms, with post-optimizer events %.1f ms; one gather takes %.1f ms", kSteps,
      without, with, comm);
  EXPECT_GT(without - with, 0.6 * (kSteps - 1) * comm);
}

// ------------------------------------------------------------ Host and device

// The host runs ahead: it waits for its peers, and never for the GPU.
TEST(HostOnGpu, NeverWaitsForTheGpuInAStep) {
  SKIP_WITHOUT_GPU();
  gpu_sleep(0);
  for (const int n : {2, 4, 8}) {
    run_ranks(n, [&](int rank) {
      const OwnStream own;
      const auto mesh = init_device_mesh(torch::kCUDA, {n});
      auto net = seeded<Transformer>(ModelArgs{.dropout_p = 0});
      shard_transformer(net, {.mesh = mesh});
      torch::optim::SGD optimizer(unique_parameters(*net), 1e-3);
      const auto tokens = random_tokens(0, {2, 16}, 8).cuda();
      const auto step = [&] {
        net(tokens).sum().backward();
        optimizer.step();
        optimizer.zero_grad();
      };
      for (int i = 0; i < 3; ++i) {
        step(); // what is allocated or built once may wait
      }
      torch::cuda::synchronize();
      default_group().barrier();
      const auto start = std::chrono::steady_clock::now();
      gpu_sleep(1000);
      step(); // no more kernels than a stream may have in its queue
      const double host = host_ms_since(start);
      c10::Event end(torch::kCUDA);
      end.record(gpu_stream());
      EXPECT_FALSE(end.query()) << "returned after " << host;
      EXPECT_LT(host, 800);
      default_group().barrier(); // the others' sleeps go on while this one looks
      torch::cuda::synchronize();
      if (rank == 0) {
        figure("%d ranks: a step enqueued in %.1f ms behind a GPU that is busy", n, host);
      }
    });
  }
}

TEST(HostOnGpu, NeverWaitsForTheGpuInACollective) {
  SKIP_WITHOUT_GPU();
  gpu_sleep(0);
  for (const int n : {2, 4, 8}) {
    run_ranks(n, [&](int rank) {
      const OwnStream own;
      const auto world = default_group();
      auto one = torch::ones({1024}, gpu());
      auto all = torch::zeros({n * 1024}, gpu());
      const auto every = [&] {
        world.all_gather(all, one);
        world.reduce_scatter(one, all, ReduceOp::Avg);
        world.all_reduce(one, ReduceOp::Avg);
        world.broadcast(one, 0);
      };
      every();
      torch::cuda::synchronize();
      world.barrier();
      const auto start = std::chrono::steady_clock::now();
      if (rank == n - 1) {
        gpu_sleep(1000); // the others' results wait for this one's, on the GPU
      }
      every();
      const double host = host_ms_since(start);
      c10::Event end(torch::kCUDA);
      end.record(gpu_stream());
      EXPECT_FALSE(end.query());
      EXPECT_LT(host, 800);
      world.barrier();
      EXPECT_TRUE((one == 1).all().item<bool>());
    });
  }
}

} // namespace
} // namespace fsdp
