// The nccl backend: on one GPU a world of one rank. `NcclRanks` is for several,
// one per GPU:  fsdp run -n 8 -- gpu_tests --gtest_filter='NcclRanks.*'
#include <fsdp/debug.h>
#include <fsdp/error.h>
#include <fsdp/optim.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <thread>

#include "support/collective_checks.h"
#include "support/gpu.h"
#include "support/processes.h"
#include "support/sharded.h"

namespace fsdp {
namespace {

using namespace test;

/// This test once more in a process of its own, as the one rank of a world.
void in_a_process(const std::function<void()>& body) {
  expect_ranks_pass(1, body);
}

TEST(NcclOnGpu, OneRankHasEveryCollective) {
  SKIP_WITHOUT_GPU();
  in_a_process([] {
    const Joined joined({.backend = "nccl"});
    const auto world = default_group();
    EXPECT_EQ(world.backend_name(), "nccl");
    check_every_collective(world, 5, gpu());
    const OwnStream own;
    check_every_collective(world, 70'000, gpu());
    check_every_collective(world.new_group({0}, "again"), 1000, gpu());
  });
}

TEST(NcclOnGpu, IsPickedWhereThereIsAGpu) {
  SKIP_WITHOUT_GPU();
  in_a_process([] {
    const Joined joined({});
    EXPECT_EQ(default_group().backend_name(), "nccl");
  });
}

TEST(NcclOnGpu, OneRankTrainsLikeTheUnshardedModel) {
  SKIP_WITHOUT_GPU();
  in_a_process([] {
    const Joined joined({.backend = "nccl"});
    for (const bool replicas : {false, true}) { // with them, gradients are all-reduced
      const auto mesh = replicas
                            ? init_device_mesh(torch::kCUDA, {1, 1}, {"dp_replicate", "dp_shard"})
                            : init_device_mesh(torch::kCUDA, {1});
      auto net = seeded<Transformer>(ModelArgs{.n_layers = 2, .dropout_p = 0});
      auto reference = seeded<Transformer>(ModelArgs{.n_layers = 2, .dropout_p = 0});
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
    const Joined joined({.backend = "nccl"});
    const auto world = default_group();
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
    const Joined joined({.backend = "nccl"});
    const auto world = default_group();
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
    const Joined joined({.backend = "nccl", .timeout = std::chrono::seconds(3)});
    const auto world = default_group();
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

// ------------------------------------------------------------ Several GPUs

class NcclRanks : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    if (!std::getenv("WORLD_SIZE")) {
      GTEST_SKIP() << "start it by: fsdp run -n GPUS -- gpu_tests --gtest_filter='NcclRanks.*'";
    }
    if (torch::cuda::device_count() < 2) {
      GTEST_SKIP() << "there is one GPU here, and nccl wants one per rank";
    }
    joined.emplace(InitOptions{.backend = "nccl"});
  }
  std::optional<Joined> joined;
};

TEST_F(NcclRanks, MatchTheDefinitionsAndTrain) {
  const c10::Device mine(torch::kCUDA, static_cast<c10::DeviceIndex>(get_local_rank()));
  check_every_collective(default_group(), 5, mine);
  check_every_collective(default_group(), 70'000, mine);
  const auto mesh = init_device_mesh(torch::kCUDA, {get_world_size()});
  for (const ReshardAfterForward& reshard :
       {ReshardAfterForward(true), ReshardAfterForward(false)}) {
    auto net = seeded<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0});
    auto reference = seeded<Transformer>(ModelArgs{.n_layers = 3, .dropout_p = 0});
    reference->to(mine);
    shard_transformer(net, {.mesh = mesh, .reshard_after_forward = reshard});
    FSDPModule::of(net).set_allocate_memory_from_process_group_for_comm(true);
    train_and_compare(net, reference, [&](Transformer& each, int step) {
      return each(random_tokens(step, {2, 16}, 8).to(mine)).sum();
    });
  }
}

} // namespace
} // namespace fsdp
