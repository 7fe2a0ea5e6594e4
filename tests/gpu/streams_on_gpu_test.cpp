// Orders between streams, looked for by delay: one stream after another is made
// late, on one rank or on all, and every gradient must come out the same. Freed
// memory is written over at once, so that a buffer let go too early shows.
#include <fsdp/optim.h>

#include <map>
#include <set>

#include "runtime/stream.h"
#include "support/gpu.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

constexpr double kDelay = 4; // ms: far longer than any kernel here

/// Which stream is late, and where.
struct Late {
  const char* name;
  double compute = 0;
  double gather_before = 0, gather_after = 0;
  double scatter_before = 0, scatter_after = 0;
  double all_reduce = 0;
  double optimizer = 0;
};

const std::vector<Late> kLate{
    {.name = "nothing"},
    {.name = "compute", .compute = kDelay},
    {.name = "before the gather", .gather_before = kDelay},
    {.name = "after the gather", .gather_after = kDelay},
    {.name = "before the reduce-scatter", .scatter_before = kDelay},
    {.name = "after the reduce-scatter", .scatter_after = kDelay},
    {.name = "all-reduce", .all_reduce = kDelay},
    {.name = "optimizer", .optimizer = kDelay},
    {.name = "all", .compute = 1, .gather_before = 2, .scatter_after = 3, .optimizer = 2}};

struct LateStackImpl : StackImpl {
  using StackImpl::StackImpl;
  torch::Tensor forward(torch::Tensor x) {
    for (auto& mlp : mlps) {
      x = SleepFunction::apply(x + mlp(x), late_ms, late_ms);
    }
    return x;
  }
  double late_ms = 0;
};
FSDP_MODULE(LateStack);

/// Overwrites what the caching allocator has to give on the current stream.
void write_over_freed_memory() {
  std::vector<torch::Tensor> junk;
  for (int i = 0; i < 8; ++i) {
    for (const int64_t numel : {64, 1024, 16 * 1024}) {
      junk.push_back(torch::full({numel}, NAN, gpu()));
    }
  }
}

struct Plan {
  FullyShardOptions options;
  int prefetch = 0;
  int microbatches = 1;
  size_t input_buffers = 1;
  bool placed = false;         // and so not by an all-gather of the test's own
  bool separate_group = false; // for reductions
};

/// Every gradient of every step, and the parameters after it.
std::vector<torch::Tensor> train(const Plan& run, const Late& late, bool is_late) {
  // With four ranks and bf16, a rank has 16 bytes of a bias: NCCL places no less.
  constexpr int64_t kDim = 32;
  auto net = seeded<LateStack>(kDim, 4);
  LateGathers late_gathers;
  const auto gather = std::make_shared<DelayedAllGather>();
  const auto scatter = std::make_shared<DelayedReduceScatter>();
  std::vector<FSDPModule> mlps;
  for (auto& mlp : net->mlps) {
    mlps.push_back(fully_shard(mlp, run.options));
    if (!run.placed) {
      mlps.back().set_custom_all_gather(gather);
    }
    mlps.back().set_custom_reduce_scatter(scatter);
    mlps.back().set_all_reduce_hook(
        [ms = is_late ? late.all_reduce : 0](torch::Tensor&) { gpu_sleep(ms); });
  }
  auto root = fully_shard(net, run.options);
  root.set_reduce_scatter_max_input_buffers(static_cast<int>(run.input_buffers));
  root.set_separate_reduce_scatter_group(run.separate_group);
  for (size_t i = 0; run.prefetch > 0 && i + run.prefetch < mlps.size(); ++i) {
    mlps[i].set_modules_to_forward_prefetch(
        {mlps.begin() + static_cast<int64_t>(i) + 1,
         mlps.begin() + static_cast<int64_t>(i) + 1 + run.prefetch});
  }
  if (is_late) {
    net->late_ms = late.compute;
    late_gathers.ms = run.placed ? late.gather_before + late.gather_after : 0;
    gather->before_ms = late.gather_before;
    gather->after_ms = late.gather_after;
    scatter->before_ms = late.scatter_before;
    scatter->after_ms = late.scatter_after;
  }
  optim::AdamW optimizer(unique_parameters(*net), 1e-2);
  std::vector<torch::Tensor> seen;
  for (int step = 0; step < 3; ++step) {
    for (int i = 0; i < run.microbatches; ++i) {
      root.set_requires_gradient_sync(i + 1 == run.microbatches);
      net(random_batch(10 * step + i, {4, kDim}).cuda()).pow(2).mean().backward();
      write_over_freed_memory();
    }
    for (const auto& param : unique_parameters(*net)) {
      seen.push_back(param.grad().clone());
    }
    if (is_late) {
      gpu_sleep(late.optimizer);
    }
    optimizer.step();
    optimizer.zero_grad();
    write_over_freed_memory();
    for (const auto& param : unique_parameters(*net)) {
      seen.push_back(param.detach().clone());
    }
  }
  EXPECT_EQ(late_gathers.num_placed > 0, run.placed);
  return seen;
}

void expect_same_whoever_is_late(int num_ranks, const std::function<Plan()>& make_run) {
  gpu_sleep(0);
  run_ranks(num_ranks, [&](int rank) {
    const OwnStream own;
    const auto run = make_run();
    SCOPED_TRACE_OF(
        run.options.reshard_after_forward, run.options.mp_policy, run.prefetch, run.separate_group);
    const auto expected = train(run, kLate.front(), false);
    for (const auto& late : kLate) {
      for (const int who : {-1, num_ranks - 1}) { // all of them, or one
        SCOPED_TRACE(c10::str("late: ", late.name, ", rank ", who));
        const auto actual = train(run, late, who < 0 || who == rank);
        ASSERT_EQ(actual.size(), expected.size());
        for (size_t i = 0; i < actual.size(); ++i) {
          EXPECT_TRUE(near(actual[i], expected[i], 1e-6)) << "tensor " << i;
        }
      }
    }
  });
}

class LateStreamsOnGpu : public testing::TestWithParam<int> {};

TEST_P(LateStreamsOnGpu, ChangeNoGradient) {
  SKIP_WITHOUT_GPU();
  for (const ReshardAfterForward& reshard :
       {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
    expect_same_whoever_is_late(GetParam(), [&] {
      return Plan{
          .options = {
              .mesh = init_device_mesh(torch::kCUDA, {get_world_size()}),
              .reshard_after_forward = reshard}};
    });
  }
}

TEST_P(LateStreamsOnGpu, ChangeNothingWithPrefetchCastsAndAccumulation) {
  SKIP_WITHOUT_GPU();
  for (const bool separate_group : {false, true}) {
    expect_same_whoever_is_late(GetParam(), [=] {
      return Plan{
          .options =
              {.mesh = init_device_mesh(torch::kCUDA, {get_world_size()}),
               .reshard_after_forward = true,
               .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}},
          .prefetch = 2,
          .microbatches = 2,
          .input_buffers = 2,
          .separate_group = separate_group};
    });
  }
}

// The same over placed gathers, whose buffers are the parameters: what is gathered next
// lands where a group before was.
TEST_P(LateStreamsOnGpu, ChangeNoGradientWhereGathersArePlaced) {
  SKIP_WITHOUT_GPU();
  const PlacedGathers placed(detail::PlaceGathers::Always);
  for (const ReshardAfterForward& reshard :
       {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
    expect_same_whoever_is_late(GetParam(), [&] {
      return Plan{
          .options =
              {.mesh = init_device_mesh(torch::kCUDA, {get_world_size()}),
               .reshard_after_forward = reshard},
          .placed = true};
    });
  }
}

TEST_P(LateStreamsOnGpu, ChangeNothingWithPrefetchCastsAndAccumulationWherePlaced) {
  SKIP_WITHOUT_GPU();
  const PlacedGathers placed(detail::PlaceGathers::Always);
  for (const int ahead : {0, 1, 2}) {
    expect_same_whoever_is_late(GetParam(), [&] {
      return Plan{
          .options =
              {.mesh = init_device_mesh(torch::kCUDA, {get_world_size()}),
               .reshard_after_forward = true,
               .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}},
          .prefetch = ahead,
          .microbatches = 2,
          .input_buffers = 2,
          .placed = true};
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    WorldSizes, LateStreamsOnGpu, testing::Values(2, 4), testing::PrintToStringParamName());

TEST(LateStreamsOnGpu2x2, ChangeNothingWithReplicas) {
  SKIP_WITHOUT_GPU();
  for (const auto reduce_dtype : {torch::kFloat, torch::kBFloat16}) { // of its own, or not
    expect_same_whoever_is_late(4, [&] {
      return Plan{
          .options = {
              .mesh = init_device_mesh(torch::kCUDA, {2, 2}, {"dp_replicate", "dp_shard"}),
              .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = reduce_dtype}}};
    });
  }
}

// Shards are laid out anew when somebody has replaced them (Module::to), just
// before their gather and behind the compute that is under way.
TEST(StreamsOnGpu, GathersSeeShardsThatAreStillBeingWritten) {
  SKIP_WITHOUT_GPU();
  gpu_sleep(0);
  run_ranks(2, [](int) {
    const OwnStream own;
    const auto mesh = init_device_mesh(torch::kCUDA, {2});
    auto reference = seeded<LateStack>(16);
    reference->to(torch::kCUDA);
    const auto x = random_batch(0, {4, 16}).cuda();
    const auto expected = reference(x).detach();
    auto net = seeded<LateStack>(16);
    net->to(torch::kCUDA);
    torch::cuda::synchronize();
    gpu_sleep(20);
    for (auto& mlp : net->mlps) {
      fully_shard(mlp, {.mesh = mesh});
    }
    fully_shard(net, {.mesh = mesh});
    net->late_ms = 20;
    EXPECT_TRUE(near(net(x).detach(), expected, 1e-5));
    for (int i = 0; i < 3; ++i) {
      net->to(torch::kDouble);
      net->to(torch::kFloat);
      write_over_freed_memory();
      EXPECT_TRUE(near(net(x).detach(), expected, 1e-5));
    }
  });
}

// A forward and a backward on another stream than the ones before.
TEST(StreamsOnGpu, AnotherStreamEachStep) {
  SKIP_WITHOUT_GPU();
  gpu_sleep(0);
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(torch::kCUDA, {2});
    const ModelArgs args{.n_layers = 2, .dropout_p = 0}; // tied: one gradient is a sum
    auto [net, reference] = twins<Transformer>(args);
    reference->to(torch::kCUDA);
    shard_transformer(net, {.mesh = mesh});
    for (int step = 0; step < 4; ++step) {
      SCOPED_TRACE(step);
      const OwnStream own;
      const auto tokens = random_tokens(step, {2, 16}, 8).cuda();
      reference(tokens).sum().backward();
      average_gradients(*reference);
      gpu_sleep(20);
      net(tokens).sum().backward();
      expect_parity(*net, *reference);
      net->zero_grad();
      reference->zero_grad();
      torch::cuda::synchronize();
    }
  });
}

// Short, for compute-sanitizer.
TEST(StreamsOnGpu, ASmallModelTrains) {
  SKIP_WITHOUT_GPU();
  run_ranks(2, [](int) {
    const OwnStream own;
    auto [net, reference] = twins<Stack>(8, 2);
    reference->to(torch::kCUDA);
    for (auto& mlp : net->mlps) {
      fully_shard(mlp, {.mesh = init_device_mesh(torch::kCUDA, {2})});
    }
    fully_shard(net, {.mesh = init_device_mesh(torch::kCUDA, {2})});
    train_and_compare(
        net, reference,
        [](Stack& each, int step) { return each(random_batch(step, {4, 8}).cuda()).sum(); }, 2);
  });
}

/// Remembers the streams that this thread's collectives are queued on, by kind.
struct SeenStreams : detail::CollectiveObserver {
  void on_collective(const detail::ObservedCollective& started) override {
    streams[started.call.kind].insert(detail::current_stream(gpu()).id());
  }
  std::map<detail::CollectiveKind, std::set<c10::StreamId>> streams;
};

TEST(SharedContext, UsesOneStreamOfEachKind) {
  SKIP_WITHOUT_GPU();
  run_ranks(2, [](int) {
    const OwnStream own;
    std::vector<MLP> roots;
    std::vector<FSDPModule> handles;
    for (int i = 0; i < 3; ++i) {
      roots.push_back(seeded<MLP>(16));
      roots.back()->to(torch::kCUDA);
      handles.push_back(fully_shard(roots.back()));
    }
    share_comm_ctx(handles);
    SeenStreams seen;
    for (int step = 0; step < 2; ++step) {
      auto x = random_batch(step, {4, 16}).cuda();
      for (auto& root : roots) {
        x = root(x);
      }
      x.sum().backward();
    }
    const auto& gathers = seen.streams[detail::CollectiveKind::AllGather];
    const auto& reductions = seen.streams[detail::CollectiveKind::ReduceScatter];
    EXPECT_EQ(gathers.size(), 1u);
    EXPECT_EQ(reductions.size(), 1u);
    EXPECT_NE(gathers, reductions);
  });
}

} // namespace
} // namespace fsdp
