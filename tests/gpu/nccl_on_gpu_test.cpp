// The nccl backend: a world of one rank. `NcclRanks` is for several ranks, each with a GPU of its
// own or all on one: FSDP_TEST_BACKEND=nccl fsdp run -n 8 -- gpu_tests --gtest_filter='NcclRanks.*'
#include <fsdp/debug.h>
#include <fsdp/error.h>
#include <fsdp/optim.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <thread>

#include "gpu/overlap_fixture.h"
#include "process_group/nccl/nccl_backend.h"
#include "runtime/stream.h"
#include "support/collective_checks.h"
#include "support/gpu.h"
#include "support/nccl_ranks.h"
#include "support/processes.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

/// A real NCCL group of this process alone. The library itself needs none: a
/// world of one rank sends nothing.
ProcessGroup nccl_alone(std::chrono::milliseconds timeout = std::chrono::minutes(1)) {
  const auto backend = detail::make_nccl(
      {.store =
           c10::make_intrusive<c10d::PrefixStore>("alone", c10::make_intrusive<c10d::HashStore>()),
       .rank = 0,
       .size = 1,
       .name = "alone",
       .world_ranks = {0},
       .timeout = timeout});
  return ProcessGroup(backend, "alone");
}

/// This test once more, in a process of its own.
void in_a_process(const std::function<void()>& body) {
  expect_ranks_pass(1, body);
}

TEST(NcclOnGpu, OneRankHasEveryCollective) {
  SKIP_WITHOUT_GPU();
  in_a_process([] {
    const auto group = nccl_alone();
    EXPECT_EQ(group.backend_name(), "nccl");
    check_every_collective(group, 5, gpu());
    const OwnStream own;
    check_every_collective(group, 70'000, gpu());
  });
}

// Parts of an input, each into its place, in one launch and on NCCL's own stream.
TEST(NcclOnGpu, PutsPartsWhereTheyBelong) {
  SKIP_WITHOUT_GPU();
  in_a_process([] {
    gpu_sleep(0);
    const auto group = nccl_alone();
    const OwnStream own;
    constexpr int64_t kPart = 1 << 18;
    const auto plan = std::make_shared<detail::GatherPlan>(detail::GatherPlan{
        .parts =
            {{.in = 0, .out = kPart, .numel = kPart, .unpadded_numel = kPart},
             {.in = kPart, .out = 0, .numel = 0, .unpadded_numel = 0},
             {.in = kPart, .out = 0, .numel = 256, .unpadded_numel = 256}},
        .ranks = 1,
        .in_numel = kPart + 256,
        .out_numel = 2 * kPart});
    const auto options = torch::device(gpu()).dtype(torch::kBFloat16);
    EXPECT_FALSE(detail::places_gathers(group, *plan, options)); // half a MiB in three parts
    {
      const PlacedGathers always(detail::PlaceGathers::Always);
      EXPECT_TRUE(detail::places_gathers(group, *plan, options));
      auto odd = *plan;
      odd.parts[2].numel = 255;
      EXPECT_FALSE(detail::places_gathers(group, odd, options));
    }
    for (int step = 1; step < 10; ++step) {
      gpu_sleep(5);
      auto in = torch::full({kPart + 256}, step, options);
      in.narrow(0, kPart, 256).fill_(-step);
      auto out = torch::zeros({2 * kPart}, options);
      auto work = detail::all_gather_placed_async(group, out, in, plan);
      in = torch::Tensor(); // its memory is used again
      const auto junk = torch::full({kPart + 256}, 77, options);
      work.wait();
      EXPECT_TRUE((out.narrow(0, kPart, kPart) == step).all().item<bool>());
      EXPECT_TRUE((out.narrow(0, 0, 256) == -step).all().item<bool>());
      EXPECT_TRUE((out.narrow(0, 256, kPart - 256) == 0).all().item<bool>());
    }
  });
}

TEST(NcclOnGpu, IsPickedWhereThereIsAGpu) {
  SKIP_WITHOUT_GPU();
  in_a_process([] {
    const ScopedProcessGroup joined({});
    EXPECT_EQ(default_group().backend_name(), "nccl");
  });
}

// The order of its streams beside the engine's: NCCL has one of its own.
TEST(NcclOnGpu, WorkIsWaitedForByTheStreamThatAsks) {
  SKIP_WITHOUT_GPU();
  in_a_process([] {
    gpu_sleep(0);
    const auto group = nccl_alone();
    const OwnStream own;
    auto out = torch::zeros({1 << 20}, gpu());
    group.all_gather(out, torch::ones({1 << 20}, gpu()));
    torch::cuda::synchronize();
    std::vector<double> host_ms;
    for (int step = 1; step < 20; ++step) {
      const auto start = std::chrono::steady_clock::now();
      gpu_sleep(20);
      auto in = torch::full({1 << 20}, step, torch::device(gpu()).dtype(torch::kFloat));
      auto work = group.all_gather_async(out, in);
      in = torch::Tensor(); // its memory is used again
      auto junk = torch::full({1 << 20}, -1.0, gpu());
      work.wait();
      const auto sum = out.sum();
      host_ms.push_back(host_ms_since(start));
      EXPECT_EQ(sum.item<double>(), static_cast<double>(step) * (1 << 20));
    }
    // Most of them, since new memory may have to be asked of the driver, which waits.
    std::sort(host_ms.begin(), host_ms.end());
    EXPECT_LT(host_ms[host_ms.size() - 3], 15) << "the host has waited for the GPU";
  });
}

TEST(NcclOnGpu, OneRankTrainsLikeTheUnshardedModel) {
  SKIP_WITHOUT_GPU();
  in_a_process([] {
    const ScopedProcessGroup joined({.backend = "nccl"});
    for (const bool replicas : {false, true}) { // with them, gradients are all-reduced
      SCOPED_TRACE_OF(replicas);
      const auto mesh = replicas
                            ? init_device_mesh(torch::kCUDA, {1, 1}, {"dp_replicate", "dp_shard"})
                            : init_device_mesh(torch::kCUDA, {1});
      auto [net, reference] = twins<Transformer>(ModelArgs{.n_layers = 2, .dropout_p = 0});
      reference->to(torch::kCUDA);
      shard_transformer(net, {.mesh = mesh});
      FSDPModule::of(net).set_allocate_memory_from_process_group_for_comm(true);
      train_and_compare(net, reference, [](Transformer& each, int step) {
        return each(random_tokens(step, {2, 16}, 8).cuda()).sum();
      });
    }
  });
}

TEST(NcclOnGpu, GivesMemoryOfItsOwn) {
  SKIP_WITHOUT_GPU();
  in_a_process([] {
    const auto world = nccl_alone();
    const auto options = torch::device(gpu()).dtype(torch::kFloat);
    world.all_reduce(torch::ones({4}, gpu())); // the communicator is made by the first one
    auto memory = world.allocate(1000, options);
    EXPECT_EQ(memory.numel(), 1000);
    EXPECT_EQ(memory.device(), gpu());
    memory.fill_(3);
    auto gathered = torch::empty({1000}, gpu());
    world.all_gather(gathered, memory);
    EXPECT_SAME(gathered, torch::full({1000}, 3.0));
  });
}

TEST(NcclOnGpu, AnAbortedGroupGivesCommErrors) {
  SKIP_WITHOUT_GPU();
  in_a_process([] {
    const auto world = nccl_alone();
    auto x = torch::ones({4}, gpu());
    world.all_reduce(x);
    torch::cuda::synchronize();
    world.backend()->abort();
    const auto message = message_of<CommError>([&] { world.all_reduce(x); });
    EXPECT_TRUE(contains(message, "all_reduce"));
    EXPECT_TRUE(contains(message, "rank 0"));
    EXPECT_TRUE(contains(message, "nccl"));
  });
}

// A collective that does not end in time is aborted by NCCL's watchdog, and the
// next call tells.
TEST(NcclOnGpu, ATimeOutGivesACommError) {
  SKIP_WITHOUT_GPU();
  in_a_process([] {
    gpu_sleep(0);
    const auto world = nccl_alone(std::chrono::seconds(3));
    auto x = torch::ones({4}, gpu());
    world.all_reduce(x); // makes the communicator
    torch::cuda::synchronize();
    gpu_sleep(10'000);
    world.all_reduce(x); // cannot begin for ten seconds
    const auto start = std::chrono::steady_clock::now();
    std::string message;
    while (message.empty() && host_ms_since(start) < 30'000) {
      try {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        world.all_reduce(x);
      } catch (const CommError& error) {
        message = error.what();
      }
    }
    EXPECT_TRUE(contains(message, "all_reduce"));
    figure(
        "nccl: a collective that hangs is an error after %.1f s, with a timeout of 3 s",
        host_ms_since(start) / 1000);
  });
}

// ------------------------------------------------------------ Several ranks

TEST_F(NcclRanks, MatchTheDefinitionsAndTrain) {
  const auto mine = detail::current_device(torch::kCUDA);
  check_every_collective(default_group(), 5, mine);
  check_every_collective(default_group(), 70'000, mine);
  const auto mesh = init_device_mesh(torch::kCUDA, {get_world_size()});
  for (const auto place : {detail::PlaceGathers::Never, detail::PlaceGathers::Always}) {
    SCOPED_TRACE(place == detail::PlaceGathers::Always ? "placed" : "not placed");
    const PlacedGathers placed(place); // by parts that divide evenly
    auto [net, reference] = twins<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0});
    reference->to(mine);
    shard_transformer(net, {.mesh = mesh});
    train_and_compare(net, reference, [&](Transformer& each, int step) {
      return each(random_tokens(step, {2, 16}, 8).to(mine)).sum();
    });
  }
  for (const ReshardAfterForward& reshard :
       {ReshardAfterForward(true), ReshardAfterForward(false)}) {
    SCOPED_TRACE_OF(reshard);
    auto [net, reference] = twins<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0});
    reference->to(mine);
    shard_transformer(net, {.mesh = mesh, .reshard_after_forward = reshard});
    FSDPModule::of(net).set_allocate_memory_from_process_group_for_comm(true);
    train_and_compare(net, reference, [&](Transformer& each, int step) {
      return each(random_tokens(step, {2, 16}, 8).to(mine)).sum();
    });
  }
}

/// Two modules of the same sizes that each rank may call in another order.
struct SwappedImpl : torch::nn::Module {
  SwappedImpl() : a(register_module("a", MLP(6))), b(register_module("b", MLP(6))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return swapped ? a(b(x)) : b(a(x));
  }
  MLP a, b;
  bool swapped = false;
};
FSDP_MODULE(Swapped);

// NCCL itself would mix the weights of both, without a word.
TEST_F(NcclRanks, AnotherOrderIsFoundTwoStepsLater) {
  const auto mine = detail::current_device(torch::kCUDA);
  const auto mesh = init_device_mesh(torch::kCUDA, {get_world_size()});
  auto net = seeded<Swapped>();
  for (auto& each : {net->a, net->b}) {
    fully_shard(each, {.mesh = mesh});
  }
  fully_shard(net, {.mesh = mesh});
  const auto step = [&] { net(random_batch(0, {2, 6}).to(mine)).sum().backward(); };
  for (int i = 0; i < 5; ++i) {
    step();
  }
  net->swapped = get_rank() == 1;
  step();
  net->swapped = false;
  step();
  const auto message = message_of<CommError>(step);
  EXPECT_TRUE(contains(message, "different calls in an earlier step"));
  EXPECT_TRUE(contains(message, "rank 0: all_gather of module 'a'"));
  EXPECT_TRUE(contains(message, "rank 1: all_gather of module 'b'"));
}

/// When the compute of a backward ends whose reductions are late, in milliseconds. One more
/// backward comes before it, to warm up.
double compute_of_a_backward(bool separate_group) {
  const OwnStream own;
  gpu_sleep(0);
  constexpr int kLayers = 6;
  DelayedStack stack(kLayers, 5, init_device_mesh(torch::kCUDA, {get_world_size()}));
  for (auto& layer : stack.layers) {
    layer.set_reduce_scatter_max_input_buffers(kLayers);
    layer.set_separate_reduce_scatter_group(separate_group);
  }
  stack.scatter->before_ms = 20;                                   // twice the backward of a layer
  c10::Event start(torch::kCUDA, c10::EventFlag::BACKEND_DEFAULT); // which records times
  c10::Event end(torch::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  stack.x.register_hook([&](const torch::Tensor&) { end.record(gpu_stream()); });
  for (int i = 0; i < 2; ++i) {
    const auto loss = stack.net(stack.x).sum();
    default_group().barrier();
    start.record(gpu_stream());
    loss.backward();
    torch::cuda::synchronize();
  }
  return start.elapsedTime(end);
}

// NCCL runs the collectives of one group in their order, so a late reduction holds up a gather.
// That takes a hardware queue for each stream. Ranks side by side (MPS) have too few of them.
TEST_F(NcclRanks, ASeparateGroupLetsGathersPassReductions) {
  if (std::getenv("CUDA_MPS_PIPE_DIRECTORY")) {
    GTEST_SKIP() << "streams share hardware queues under MPS";
  }
  const double one_group = compute_of_a_backward(false);
  const double two_groups = compute_of_a_backward(true);
  if (get_rank() == 0) {
    figure(
        "compute of a backward with late reductions: %.1f ms, with a separate group for them "
        "%.1f ms",
        one_group, two_groups);
  }
  EXPECT_LT(two_groups, 0.85 * one_group);
}

} // namespace
} // namespace fsdp
