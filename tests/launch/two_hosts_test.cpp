// Ranks on two hosts: network namespaces joined by a veth pair.
#include <torch/torch.h>

#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include "support/collective_checks.h"
#include "support/processes.h"
#include "support/two_hosts.h"

namespace fsdp {
namespace {

std::vector<test::Ended> run_on_two_hosts(const test::TwoHosts& hosts, const std::string& filter) {
  std::vector<test::Command> commands;
  for (int rank = 0; rank < 4; ++rank) {
    commands.push_back(
        {hosts.on(rank / 2, {test::this_program(), "--gtest_filter=" + filter}),
         {{"FSDP_TEST_ON_HOSTS", "1"},
          {"RANK", std::to_string(rank)},
          {"WORLD_SIZE", "4"},
          {"LOCAL_RANK", std::to_string(rank % 2)},
          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", test::TwoHosts::address(0)},
          {"MASTER_PORT", "29511"},
          {"OMP_NUM_THREADS", "1"}}});
  }
  return test::run_commands(commands);
}

TEST(TwoHosts, CommunicateOverTheirNetwork) {
  if (std::getenv("FSDP_TEST_ON_HOSTS")) {
    init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(30)});
    test::check_every_collective(default_group(), 100);
    default_group().barrier();
    return;
  }
  const test::TwoHosts hosts;
  if (!hosts.made()) {
    GTEST_SKIP() << "network namespaces are not permitted here, or iproute2 is missing";
  }
  for (const auto& ended : run_on_two_hosts(hosts, "TwoHosts.CommunicateOverTheirNetwork")) {
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
  }
}

TEST(TwoHosts, NameAPeerThatDiedOnTheOtherHost) {
  if (std::getenv("FSDP_TEST_ON_HOSTS")) {
    init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
    default_group().barrier();
    if (get_rank() == 3) {
      _exit(0);
    }
    const auto message = test::message_of<CommError>([] {
      while (true) {
        default_group().all_reduce(torch::zeros(4));
      }
    });
    // Whoever notices late finds those who gave up gone as well.
    EXPECT_TRUE(test::contains(message, "3 is gone") || test::contains(message, "3 are gone"))
        << message;
    sleep(4); // rank 0 serves the store that has the first diagnosis
    return;
  }
  const test::TwoHosts hosts;
  if (!hosts.made()) {
    GTEST_SKIP() << "network namespaces are not permitted here, or iproute2 is missing";
  }
  for (const auto& ended : run_on_two_hosts(hosts, "TwoHosts.NameAPeerThatDiedOnTheOtherHost")) {
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
  }
}

} // namespace
} // namespace fsdp
