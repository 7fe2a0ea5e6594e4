// What replicas of shards overlap: FSDP2's table of stream behaviour, on a
// fake world of two replicas of two shards. The all-reduce is delayed by its
// hook, which runs on its stream.
#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <string_view>

#include "gpu/overlap_fixture.h"

namespace fsdp {
namespace {

using namespace test;

constexpr double kDelay = 30; // ms
constexpr int64_t kLayers = 3;

class HsdpOverlapOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    joined.emplace(InitOptions{.backend = "fake", .rank = 0, .world_size = 4});
    own.emplace();
    gpu_sleep(0);
    delay = median_gpu_ms([] { gpu_sleep(kDelay); });
  }

  DelayedStack make(double compute_ms, int64_t depth = kLayers) {
    DelayedStack stack(
        depth, compute_ms, init_device_mesh(torch::kCUDA, {2, 2}, {"dp_replicate", "dp_shard"}));
    for (auto& layer : stack.layers) {
      layer.set_all_reduce_hook([this](torch::Tensor&) { gpu_sleep(all_reduce_ms); });
    }
    return stack;
  }

  /// What the delays add to a backward, in units of one delay.
  double added(DelayedStack& stack, double scatter_ms, double reduce_ms) {
    stack.scatter->before_ms = 0;
    all_reduce_ms = 0;
    const double without = stack.backward_ms();
    stack.scatter->before_ms = scatter_ms;
    all_reduce_ms = reduce_ms;
    return (stack.backward_ms() - without) / delay;
  }

  std::optional<ScopedProcessGroup> joined;
  std::optional<OwnStream> own;
  double delay = 0;
  double all_reduce_ms = 0;
};

TEST_F(HsdpOverlapOnGpu, AnAllReduceWaitsForItsReduceScatter) {
  auto stack = make(0, 1);
  EXPECT_TRUE(between(added(stack, kDelay, 0), 0.7, 1.5));
  EXPECT_TRUE(between(added(stack, kDelay, kDelay), 1.6, 2.6)); // one behind the other
}

TEST_F(HsdpOverlapOnGpu, AllReducesAreInSeries) {
  auto stack = make(0);
  const double all = added(stack, 0, kDelay);
  figure("HSDP, %ld layers without compute: delayed all-reduces add %.2f delays", kLayers, all);
  EXPECT_TRUE(between(all, 0.8 * kLayers, 1.4 * kLayers));
}

TEST_F(HsdpOverlapOnGpu, WithoutAllReducesTheReduceScattersStay) {
  auto stack = make(0);
  for (auto& layer : stack.layers) {
    layer.set_requires_all_reduce(false);
  }
  EXPECT_LT(added(stack, 0, kDelay), 0.5);
  EXPECT_GT(added(stack, kDelay, 0), 0.7);
}

TEST_F(HsdpOverlapOnGpu, AnAllReduceOverlapsTheNextReduceScatter) {
  auto stack = make(0);
  const double both = added(stack, kDelay, kDelay);
  figure(
      "HSDP, %ld layers without compute: both delayed add %.2f delays of %ld", kLayers, both,
      2 * kLayers);
  EXPECT_TRUE(between(both, kLayers, 2 * kLayers - 0.4));
}

TEST_F(HsdpOverlapOnGpu, BothHideBehindCompute) {
  auto stack = make(kDelay);
  const double both = added(stack, kDelay, kDelay);
  figure(
      "HSDP, %ld layers, backward twice a delay each: both delayed add %.2f delays of %ld", kLayers,
      both, 2 * kLayers);
  EXPECT_TRUE(between(both, 1.5, 2 * kLayers - 1));
}

/// Delays every cast that is not on the compute stream, while it lives: those of reduced
/// gradients to the dtype of the shards.
struct LateCasts {
  LateCasts() {
    const auto begin =
        [](const at::RecordFunction& called) -> std::unique_ptr<at::ObserverContext> {
      if (std::string_view(called.name()) == "aten::_to_copy" && gpu_stream() != *compute) {
        gpu_sleep(ms);
        ++count;
      }
      return nullptr;
    };
    compute = gpu_stream();
    count = 0;
    handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback(begin).scopes({at::RecordScope::FUNCTION}));
  }
  ~LateCasts() {
    at::removeCallback(handle);
  }
  LateCasts(const LateCasts&) = delete;
  LateCasts& operator=(const LateCasts&) = delete;

  static inline std::optional<c10::Stream> compute;
  static inline double ms = 0;
  static inline int count = 0;
  at::CallbackHandle handle = 0;
};

// What follows a reduction is on its stream: a layer's cast holds up the next layer's.
TEST_F(HsdpOverlapOnGpu, CastsOfReducedGradientsAreInSeries) {
  DelayedStack stack(
      kLayers, 0, init_device_mesh(torch::kCUDA, {2, 2}, {"dp_replicate", "dp_shard"}),
      /*placed=*/false, {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kBFloat16});
  const auto backward = [&] {
    stack.net->zero_grad();
    return stack.backward_ms();
  };
  const double without = backward();
  LateCasts late;
  LateCasts::ms = kDelay;
  const double casts = (backward() - without) / delay;
  figure("HSDP, %ld layers without compute: delayed casts add %.2f delays", kLayers, casts);
  EXPECT_GE(LateCasts::count, kLayers);
  EXPECT_TRUE(between(casts, 0.7 * (kLayers - 1), 1.4 * kLayers));
}

TEST_F(HsdpOverlapOnGpu, TheCallersStreamSeesTheResult) {
  auto stack = make(0, 1);
  const auto gradient = [&] {
    stack.net->zero_grad();
    stack.net(stack.x).sum().backward();
    return stack.net->layers[0]->weight.grad().clone(); // on the caller's stream, at once
  };
  const auto expected = gradient();
  stack.scatter->before_ms = kDelay;
  all_reduce_ms = kDelay;
  EXPECT_SAME(gradient(), expected);
  torch::cuda::synchronize();
}

} // namespace
} // namespace fsdp
