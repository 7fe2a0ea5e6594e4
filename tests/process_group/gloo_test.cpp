// Ranks as real processes over gloo.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <fsdp/device_mesh.h>
#include <fsdp/distributed.h>
#include <fsdp/dtensor.h>
#include <fsdp/error.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "base/hash.h"
#include "process_group/agreement.h"
#include "support/collective_checks.h"
#include "support/processes.h"

namespace fsdp {
namespace {

using test::contains;

class Gloo : public testing::TestWithParam<int> {};

TEST_P(Gloo, MatchesTheDefinitions) {
  test::expect_ranks_pass(GetParam(), [] {
    init_process_group({.backend = "gloo"});
    test::check_every_collective(default_group(), 5);
    test::check_every_collective(default_group(), 40'000);
    const std::vector<int> pair = get_rank() < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
    if (get_world_size() == 4) {
      test::check_every_collective(default_group().new_group(pair), 3);
      const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
      const auto full = torch::arange(35.0).view({7, 5});
      const auto spread = distribute_tensor(full, mesh, {Shard{0}, Shard{1}});
      EXPECT_SAME(spread.full_tensor(), full);
      EXPECT_SAME(spread.redistribute({Shard{1}, Shard{0}}).full_tensor(), full);
    }
    destroy_process_group();
    // And once more in the same processes.
    init_process_group({.backend = "gloo"});
    default_group().barrier();
    destroy_process_group();
  });
}

INSTANTIATE_TEST_SUITE_P(
    Processes, Gloo, testing::Values(1, 2, 3, 4), testing::PrintToStringParamName());

TEST(Gloo, NamesAPeerThatWasKilled) {
  const auto ended = test::spawn_ranks(3, [] {
    init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
    default_group().barrier();
    if (get_rank() == 1) {
      kill(getpid(), SIGKILL);
    }
    const auto message = test::message_of<CommError>([] {
      while (true) {
        default_group().all_reduce(torch::zeros(4));
      }
    });
    EXPECT_TRUE(contains(message, "all_reduce"));
    EXPECT_TRUE(contains(message, "rank 1 is gone"));
    sleep(4); // rank 0 serves the store that has the first diagnosis
  });
  if (!ended.empty()) {
    EXPECT_EQ(ended[0].exit_code, 0) << ended[0].output;
    EXPECT_EQ(ended[1].exit_code, 128 + SIGKILL);
    EXPECT_EQ(ended[2].exit_code, 0) << ended[2].output;
  }
}

TEST(Gloo, NamesTheRankThatServedTheStoreToo) {
  const auto ended = test::spawn_ranks(2, [] {
    init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
    default_group().barrier();
    if (get_rank() == 0) {
      _exit(3);
    }
    const auto message = test::message_of<CommError>([] {
      default_group().all_reduce(torch::zeros(4));
      default_group().all_reduce(torch::zeros(4));
    });
    EXPECT_TRUE(contains(message, "rank 0 is gone"));
  });
  if (!ended.empty()) {
    EXPECT_EQ(ended[0].exit_code, 3);
    EXPECT_EQ(ended[1].exit_code, 0) << ended[1].output;
  }
}

// As over nccl, where no call waits for the peers' opinion.
TEST(Gloo, HistoriesThatDifferAreExplainedLater) {
  test::expect_ranks_pass(2, [] {
    init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
    detail::CallHistory history({default_group().backend(), "mine", {0, 1}});
    const auto add = [&](const std::string& module) {
      const detail::CollectivePurpose purpose{
          .text = "of " + module, .hash = detail::add_to_hash(0, module)};
      history.add(
          {.kind = detail::CollectiveKind::AllGather,
           .output = torch::ones(2),
           .input = torch::ones(1),
           .purpose = std::make_shared<detail::CollectivePurpose>(purpose)});
    };
    for (int step = 0; step < 3; ++step) {
      add("a");
      history.compare(torch::kCPU);
    }
    add("a");
    add(get_rank() == 0 ? "b" : "c");
    history.compare(torch::kCPU);
    add("d");
    const auto message = test::message_of<CommError>([&] { history.compare(torch::kCPU); });
    EXPECT_TRUE(contains(message, "rank 0: all_gather of b; rank 1: all_gather of c"));
  });
}

TEST(Gloo, CatchesCallsThatDiffer) {
  test::expect_ranks_pass(2, [] {
    init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
    const auto group = default_group();
    const bool odd = get_rank() == 1;
    const auto caught = [&](const std::string& part, const std::function<void()>& call) {
      const auto message = test::message_of<CommError>(call);
      EXPECT_TRUE(contains(message, "the ranks brought different calls: rank 0: "));
      EXPECT_TRUE(contains(message, part));
    };
    caught("Int", [&] { group.all_reduce(torch::ones(4, odd ? torch::kInt : torch::kFloat)); });
    caught("Float[5]", [&] { group.all_reduce(torch::ones(odd ? 5 : 4)); });
    caught("Float[5]", [&] { group.broadcast(torch::ones(odd ? 5 : 4), 0); });
    caught("root 1", [&] { group.broadcast(torch::ones(4), odd ? 1 : 0); });
    caught("Float[10]", [&] {
      group.all_gather(torch::ones(odd ? 10 : 8), torch::ones(odd ? 5 : 4));
    });
    caught("max", [&] { group.all_reduce(torch::ones(4), odd ? ReduceOp::Max : ReduceOp::Sum); });
    caught("avg", [&] { group.all_reduce(torch::ones(4), odd ? ReduceOp::Avg : ReduceOp::Sum); });
    caught("barrier", [&] { odd ? group.barrier() : group.all_reduce(torch::ones(4)); });
    test::check_every_collective(group, 3); // and the group still works
  });
}

TEST(Gloo, TimesOutWhenAPeerIsLate) {
  test::expect_ranks_pass(2, [] {
    init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(3)});
    default_group().barrier();
    if (get_rank() == 0) {
      const auto message = test::message_of<CommError>([] { default_group().barrier(); });
      EXPECT_TRUE(contains(message, "every rank is alive"));
    } else {
      sleep(6);
    }
  });
}

/// The addresses that this process listens on, as /proc writes them.
std::set<std::string> listening_addresses() {
  std::set<std::string> inodes;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry, error).string();
    if (target.rfind("socket:[", 0) == 0) {
      inodes.insert(target.substr(8, target.size() - 9));
    }
  }
  std::set<std::string> addresses;
  for (const auto* path : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream table(path);
    std::string line;
    std::getline(table, line);
    while (std::getline(table, line)) {
      std::istringstream words(line);
      std::vector<std::string> fields(std::istream_iterator<std::string>(words), {});
      if (fields.at(3) == "0A" && inodes.count(fields.at(9))) { // 0A: listening
        addresses.insert(fields.at(1).substr(0, fields.at(1).find(':')));
      }
    }
  }
  return addresses;
}

TEST(Gloo, OnOneMachineListensOnLoopbackOnly) {
  test::expect_ranks_pass(2, [] {
    init_process_group({.backend = "gloo"});
    default_group().barrier();
    EXPECT_EQ(listening_addresses(), std::set<std::string>{"0100007F"}); // 127.0.0.1
    default_group().barrier();
  });
}

} // namespace
} // namespace fsdp
