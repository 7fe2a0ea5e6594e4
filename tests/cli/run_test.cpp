// `fsdp run`, from outside.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "support/processes.h"
#include "support/tensors.h"
#include "support/two_hosts.h"

namespace fsdp::test {
namespace {

const std::string kTool = FSDP_BIN_DIR "/fsdp";
const std::string kProgram = FSDP_BIN_DIR "/rank_program";

/// The launcher's own children must not inherit what a test harness sets.
const Environment kClean{
    {"RANK", ""},
    {"WORLD_SIZE", ""},
    {"MASTER_ADDR", ""},
    {"MASTER_PORT", ""},
    {"OMP_NUM_THREADS", ""}};

Ended run(std::vector<std::string> words) {
  words.insert(words.begin(), kTool);
  return run_commands({{words, kClean}})[0];
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++found;
  }
  return found;
}

TEST(Run, StartsEveryRankAndMarksItsOutput) {
  const auto ended = run({"run", "-n", "3", "--", kProgram, "echo", "--flag", "two words"});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  for (const auto* rank : {"0", "1", "2"}) {
    const std::string mark = std::string("[rank ") + rank + "] ";
    EXPECT_TRUE(contains(ended.output, mark + "--flag\n"));
    EXPECT_TRUE(contains(ended.output, mark + "two words\n"));
    EXPECT_TRUE(contains(ended.output, mark + "rank " + rank + " of 3 has "));
  }
}

TEST(Run, RanksMeet) {
  const auto ended = run({"run", "-n", "4", "--", kProgram});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_EQ(count(ended.output, "sum 10\n"), 4) << ended.output;
}

TEST(Run, OneFailingRankEndsAllAndItsExitCodeIsPassedOn) {
  const auto start = std::chrono::steady_clock::now();
  const auto ended = run({"run", "-n", "3", "--", kProgram, "fail", "1", "41"});
  EXPECT_EQ(ended.exit_code, 41) << ended.output;
  EXPECT_TRUE(contains(ended.output, "rank 1 failed first, with exit code 41"));
  EXPECT_TRUE(contains(ended.output, "  this is why\n"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(40));
}

TEST(Run, NamesTheSignalThatKilledARank) {
  const auto ended =
      run({"run", "-n", "2", "--", "sh", "-c", "[ $RANK = 1 ] && kill -SEGV $$; sleep 60"});
  EXPECT_EQ(ended.exit_code, 128 + SIGSEGV);
  EXPECT_TRUE(contains(ended.output, "rank 1 failed first, with signal 11 (Segmentation fault)"));
}

/// Process ids that the "sleep" program left in `folder`, once all are there.
std::vector<pid_t> pids_in(const std::string& folder, size_t expected) {
  std::vector<pid_t> pids;
  for (int attempt = 0; attempt < 600 && pids.size() < expected; ++attempt) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    pids.clear();
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      pid_t pid = 0;
      if (std::ifstream(entry.path()) >> pid) {
        pids.push_back(pid);
      }
    }
  }
  return pids;
}

bool alive(pid_t pid) {
  // A zombie that nobody has waited for yet is dead enough.
  std::string word;
  std::ifstream status("/proc/" + std::to_string(pid) + "/stat");
  char state = 'X';
  status >> word >> word >> state;
  return status && state != 'Z';
}

void expect_no_process_left(int signal, int exit_code) {
  const auto folder = temporary_folder();
  const auto pid_file = folder + "/launcher.pid";
  const auto marks = folder + "/marks";
  std::filesystem::create_directory(marks);
  std::vector<pid_t> pids;
  std::thread killer([&] {
    pids = pids_in(marks, 4);
    pid_t launcher = 0;
    std::ifstream(pid_file) >> launcher;
    kill(launcher, signal);
  });
  const auto ended = run_commands(
      {{{"sh", "-c",
         "echo $$ > " + pid_file + "; exec " + kTool + " run -n 2 -- " + kProgram + " sleep " +
             marks},
        kClean}});
  killer.join();
  EXPECT_EQ(ended[0].exit_code, exit_code) << ended[0].output;
  ASSERT_EQ(pids.size(), 4u);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  for (const auto pid : pids) {
    EXPECT_FALSE(alive(pid)) << pid;
  }
}

TEST(Run, ControlCLeavesNoProcessBehind) {
  expect_no_process_left(SIGINT, 130);
}

TEST(Run, TerminationLeavesNoProcessBehind) {
  expect_no_process_left(SIGTERM, 143);
}

TEST(Run, RefusesWhatMakesNoSense) {
  const auto refused = [](const std::vector<std::string>& words, const std::string& part) {
    const auto ended = run(words);
    EXPECT_NE(ended.exit_code, 0);
    EXPECT_TRUE(contains(ended.output, part));
  };
  refused({"run", "-n", "0", "--", "true"}, "--ranks: Value 0 not in range");
  refused({"run", "--", "true"}, "--ranks is required");
  refused({"run", "-n", "2"}, "program is required");
  refused({"run", "-n", "2", "--", "no-such-program"}, "no program 'no-such-program'");
  refused({"run", "-n", "2", "--", "/no/such/program"}, "cannot run /no/such/program");
  refused({"run", "-n", "2", "--nnodes", "2", "--", "true"}, "need --master");
  refused(
      {"run", "-n", "2", "--nnodes", "2", "--node-rank", "2", "--master", "x:1", "--", "true"},
      "node rank 2");
  refused({"run", "-n", "1", "--master", "nowhere", "--", "true"}, "must be host:port");
  refused({"nonsense"}, "there is no command 'nonsense'; there are: train, run");
}

TEST(Run, TwoNodes) {
  const TwoHosts hosts;
  if (!hosts.made()) {
    GTEST_SKIP() << "network namespaces are not permitted here, or iproute2 is missing";
  }
  const auto node = [&](int rank, const std::vector<std::string>& program) {
    std::vector<std::string> words{kTool,         "run",
                                   "-n",          "2",
                                   "--nnodes",    "2",
                                   "--node-rank", std::to_string(rank),
                                   "--master",    TwoHosts::address(0) + ":29517",
                                   "--"};
    words.insert(words.end(), program.begin(), program.end());
    return Command{hosts.on(rank, words), kClean};
  };
  const auto good = run_commands({node(0, {kProgram}), node(1, {kProgram})});
  for (const auto& ended : good) {
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    EXPECT_EQ(count(ended.output, "sum 10\n"), 2) << ended.output;
  }
  for (const auto* rank : {"0", "3"}) { // on either node
    const std::vector<std::string> failing{kProgram, "fail", rank, "7"};
    for (const auto& ended : run_commands({node(0, failing), node(1, failing)})) {
      EXPECT_EQ(ended.exit_code, 7) << ended.output;
      EXPECT_TRUE(contains(ended.output, std::string("rank ") + rank + " failed first"));
    }
  }
}

TEST(Train, SaysThatItDoesNotExistYet) {
  const auto ended = run({"train", "--steps", "3"});
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.output, "train does not exist yet"));
}

} // namespace
} // namespace fsdp::test
