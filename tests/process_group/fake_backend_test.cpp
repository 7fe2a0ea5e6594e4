#include <torch/torch.h>

#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include "support/collective_checks.h"

namespace fsdp {
namespace {

/// Leaves the world however the test ends.
struct ScopedProcessGroup {
  explicit ScopedProcessGroup(const InitOptions& options) {
    init_process_group(options);
  }
  ~ScopedProcessGroup() {
    destroy_process_group();
  }
};

TEST(FakeBackend, StandsInForAnyNumberOfRanks) {
  const ScopedProcessGroup joined({.backend = "fake", .rank = 7, .world_size = 1024});
  EXPECT_EQ(get_rank(), 7);
  EXPECT_EQ(get_world_size(), 1024);
  const auto world = default_group();
  EXPECT_EQ(world.backend_name(), "fake");
  auto gathered = torch::zeros({1024, 2});
  world.all_gather(gathered, torch::ones({2}));
  EXPECT_SAME(gathered, torch::ones({1024, 2}));
  auto part = torch::zeros({2});
  world.reduce_scatter(part, torch::arange(2048.0).to(torch::kFloat), ReduceOp::Avg);
  EXPECT_SAME(part, torch::tensor({14.0f, 15.0f}));
  world.all_reduce(part, ReduceOp::premul_sum(2));
  EXPECT_SAME(part, torch::tensor({28.0f, 30.0f}));
  world.barrier();
  EXPECT_EQ(world.new_group({3, 7, 9}).rank(), 1);
  // Nothing is allocated or copied for tensors without memory.
  const auto meta = torch::device(torch::kMeta);
  world.all_gather(torch::empty({1024, 1 << 30}, meta), torch::empty({1 << 30}, meta));
}

TEST(FakeBackend, TakesItsPlaceFromTheEnvironment) {
  setenv("RANK", "3", 1);
  setenv("WORLD_SIZE", "4", 1);
  const ScopedProcessGroup joined({.backend = "fake"});
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  EXPECT_EQ(get_rank(), 3);
  EXPECT_EQ(get_world_size(), 4);
}

TEST(FakeBackend, IsExactForOneRank) {
  const ScopedProcessGroup joined({.backend = "fake"});
  test::check_every_collective(default_group(), 4);
}

TEST(InitProcessGroup, AloneIsAWorldOfOne) {
  for (const auto* name :
       {"RANK", "WORLD_SIZE", "SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    unsetenv(name);
  }
  const ScopedProcessGroup joined({});
  EXPECT_EQ(get_world_size(), 1);
  EXPECT_EQ(get_local_rank(), 0);
  test::check_every_collective(default_group(), 4);
  EXPECT_THROW(init_process_group(), c10::Error); // twice
}

TEST(InitProcessGroup, RefusesWhatMakesNoSense) {
  const auto refused = [](const std::string& part, const InitOptions& options) {
    EXPECT_TRUE(
        test::contains(test::message_of<ConfigError>([&] { init_process_group(options); }), part));
    EXPECT_FALSE(is_initialized());
  };
  refused("no backend 'mpi'", {.backend = "mpi"});
  refused("rank 3 of 2", {.backend = "fake", .rank = 3, .world_size = 2});
  refused("rank 2 of 2", {.backend = "gloo", .rank = 2, .world_size = 2});
  refused("MASTER_ADDR", {.backend = "gloo", .rank = 0, .world_size = 2});
  refused(
      "none of env://",
      {.backend = "gloo", .init_method = "udp://x:1", .rank = 0, .world_size = 2});
  refused(
      "must be host:port",
      {.backend = "gloo", .init_method = "tcp://x", .rank = 0, .world_size = 2});
  refused(
      "is not a port",
      {.backend = "gloo", .init_method = "tcp://x:70000", .rank = 0, .world_size = 2});
  refused(
      "absolute path", {.backend = "gloo", .init_method = "file://x", .rank = 0, .world_size = 2});
  refused(
      "no folder /no/such",
      {.backend = "gloo", .init_method = "file:///no/such/f", .rank = 0, .world_size = 2});
  refused("timeout", {.backend = "fake", .timeout = std::chrono::milliseconds(0)});
}

} // namespace
} // namespace fsdp
