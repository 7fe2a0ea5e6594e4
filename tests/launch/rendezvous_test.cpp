// How processes meet, and what they are told when they do not.
#include <torch/torch.h>

#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include <cstdlib>

#include "launch/socket.h"
#include "support/collective_checks.h"
#include "support/processes.h"

namespace fsdp {
namespace {

using test::contains;
using test::Environment;
using test::message_of;

constexpr auto kShort = std::chrono::seconds(5);

int rank_from_test() {
  return std::atoi(std::getenv("TEST_RANK"));
}

/// Gives the processes a rank that only the test's own code reads.
std::function<Environment(int)> without_launcher(const Environment& extra) {
  return [extra](int rank) {
    Environment environment{
        {"RANK", ""},
        {"WORLD_SIZE", ""},
        {"MASTER_ADDR", ""},
        {"MASTER_PORT", ""},
        {"TEST_RANK", std::to_string(rank)}};
    environment.insert(extra.begin(), extra.end());
    return environment;
  };
}

TEST(Rendezvous, ByTcp) {
  const auto url = "tcp://127.0.0.1:" + std::to_string(test::free_port());
  test::expect_ranks_pass(
      3,
      [] {
        init_process_group(
            {.backend = "gloo",
             .init_method = std::getenv("TEST_URL"),
             .rank = rank_from_test(),
             .world_size = 3});
        test::check_every_collective(default_group(), 3);
      },
      without_launcher({{"TEST_URL", url}}));
}

TEST(Rendezvous, ByFile) {
  const auto url = "file://" + test::temporary_folder() + "/store";
  test::expect_ranks_pass(
      2,
      [] {
        init_process_group(
            {.backend = "gloo",
             .init_method = std::getenv("TEST_URL"),
             .rank = rank_from_test(),
             .world_size = 2});
        test::check_every_collective(default_group(), 3);
      },
      without_launcher({{"TEST_URL", url}}));
}

TEST(Rendezvous, ByTheEnvironmentOfOpenMpi) {
  const auto port = std::to_string(test::free_port());
  test::expect_ranks_pass(
      2,
      [] {
        init_process_group({.backend = "gloo"});
        EXPECT_EQ(get_rank(), rank_from_test());
        EXPECT_EQ(get_local_rank(), rank_from_test());
        default_group().barrier();
      },
      [&](int rank) {
        auto environment = without_launcher({{"OMPI_COMM_WORLD_SIZE", "2"}})(rank);
        environment["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
        environment["OMPI_COMM_WORLD_RANK"] = std::to_string(rank);
        environment["OMPI_COMM_WORLD_LOCAL_RANK"] = std::to_string(rank);
        environment["MASTER_PORT"] = port;
        return environment;
      });
}

TEST(Rendezvous, RefusesWorldSizesThatDisagree) {
  test::expect_ranks_pass(
      2,
      [] {
        const auto message = message_of<CommError>([] { init_process_group({.backend = "gloo"}); });
        EXPECT_TRUE(contains(message, "rank 0 has world size 2"));
        EXPECT_TRUE(contains(message, "rank 1 has world size 3"));
        EXPECT_FALSE(is_initialized());
      },
      [](int rank) { return Environment{{"WORLD_SIZE", rank ? "3" : "2"}}; });
}

TEST(Rendezvous, TellsTheRankBeyondTheWorldToo) {
  const auto ended = test::spawn_ranks(
      3,
      [] {
        const auto join = [] { init_process_group({.backend = "gloo", .timeout = kShort}); };
        if (std::getenv("RANK") == std::string("2")) {
          EXPECT_TRUE(contains(message_of<CommError>(join), "the ranks disagree"));
        } else {
          join();
          default_group().barrier();
          sleep(5); // rank 0 serves the store that rank 2 asks
        }
      },
      [](int rank) { return Environment{{"WORLD_SIZE", rank == 2 ? "3" : "2"}}; });
  for (const auto& each : ended) {
    EXPECT_EQ(each.exit_code, 0) << each.output;
  }
}

TEST(Rendezvous, RefusesARankTwice) {
  const auto ended = test::spawn_ranks(
      2, [] { init_process_group({.backend = "gloo", .timeout = kShort}); },
      [](int) { return Environment{{"RANK", "1"}, {"TORCHELASTIC_USE_AGENT_STORE", ""}}; });
  // Neither serves the store: both wait for rank 0, and say so.
  for (const auto& each : ended) {
    EXPECT_NE(each.exit_code, 0);
    EXPECT_TRUE(contains(each.output, "is rank 0 running"));
  }
}

TEST(Rendezvous, RefusesAStaleFile) {
  const auto url = "file://" + test::temporary_folder() + "/store";
  test::expect_ranks_pass(
      2,
      [] {
        const int rank = 0; // both
        bool refused = false;
        try {
          init_process_group(
              {.backend = "gloo",
               .init_method = std::getenv("TEST_URL"),
               .rank = rank,
               .world_size = 2,
               .timeout = kShort});
        } catch (const CommError& error) {
          refused = true;
          const std::string message = error.what();
          EXPECT_TRUE(
              contains(message, "rank 0 is taken") || contains(message, "did not arrive in time"));
        }
        EXPECT_TRUE(refused);
      },
      without_launcher({{"TEST_URL", url}}));
}

TEST(Rendezvous, NamesTheRanksThatDidNotArrive) {
  test::expect_ranks_pass(
      2,
      [] {
        const auto message = message_of<CommError>(
            [] { init_process_group({.backend = "gloo", .timeout = kShort}); });
        EXPECT_TRUE(contains(message, "rank 2, 3 of 4 did not arrive in time"));
      },
      [](int) { return Environment{{"WORLD_SIZE", "4"}}; });
}

TEST(Rendezvous, ExplainsAPortInUse) {
  const auto taken = detail::listen_on("127.0.0.1", 0);
  const auto url = "tcp://127.0.0.1:" + std::to_string(taken.port);
  const auto message = message_of<CommError>([&] {
    init_process_group({.backend = "gloo", .init_method = url, .rank = 0, .world_size = 2});
  });
  EXPECT_TRUE(contains(message, "port " + std::to_string(taken.port) + " is already in use"));
  EXPECT_TRUE(contains(message, "MASTER_PORT"));
  // The other ranks of such a job reach somebody who does not answer.
  const auto other = message_of<CommError>([&] {
    init_process_group(
        {.backend = "gloo", .init_method = url, .rank = 1, .world_size = 2, .timeout = kShort});
  });
  EXPECT_TRUE(contains(other, "no store answers at " + url.substr(std::string("tcp://").size())));
}

TEST(Rendezvous, ExplainsAHostThatCannotBeResolved) {
  const auto message = message_of<CommError>([] {
    init_process_group(
        {.backend = "gloo",
         .init_method = "tcp://no-such-host.invalid:1234",
         .rank = 1,
         .world_size = 2,
         .timeout = std::chrono::seconds(2)});
  });
  EXPECT_TRUE(contains(message, "no-such-host.invalid"));
}

TEST(Rendezvous, NcclExplainsWhyItIsNotThere) {
  if (torch::cuda::is_available()) {
    GTEST_SKIP() << "CUDA is there";
  }
  test::expect_ranks_pass(2, [] {
    EXPECT_TRUE(contains(
        message_of<ConfigError>([] { init_process_group({.backend = "nccl"}); }), "use gloo"));
  });
}

TEST(Rendezvous, WorksUnderTorchrun) {
  if (std::string(FSDP_TEST_PYTHON).empty()) {
    GTEST_SKIP() << "built without FSDP_PYTHON";
  }
  if (std::getenv("FSDP_TEST_UNDER_TORCHRUN")) {
    init_process_group({.backend = "gloo"});
    EXPECT_EQ(get_world_size(), 3);
    test::check_every_collective(default_group(), 3);
    return;
  }
  const auto ended = test::run_commands(
      {{{FSDP_TEST_PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=3", "--no-python",
         "--master-port=" + std::to_string(test::free_port()), test::this_program(),
         "--gtest_filter=Rendezvous.WorksUnderTorchrun"},
        {{"FSDP_TEST_UNDER_TORCHRUN", "1"}, {"OMP_NUM_THREADS", "1"}}}});
  EXPECT_EQ(ended[0].exit_code, 0) << ended[0].output;
}

} // namespace
} // namespace fsdp
