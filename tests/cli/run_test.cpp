// `fsdp run`, from outside.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>
#include <utility>

#include "cli/tool.h"
#include "launch/socket.h"
#include "support/processes.h"
#include "support/tensors.h"
#include "support/two_hosts.h"

namespace fsdp::test {
namespace {

const std::string kProgram = FSDP_BIN_DIR "/rank_program";

/// A script that starts the launcher, and after two seconds each sends it `signals`.
Ended run_and_send(const std::string& arguments, const std::vector<std::string>& signals) {
  auto script = kTool + " run " + arguments + " & ";
  for (const auto& signal : signals) {
    script += "sleep 2; kill -" + signal + " $!; ";
  }
  return run_script(script + "wait $!");
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

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
         escaped(
             "echo $$ > " + pid_file + "; exec " + kTool + " run -n 2 -- " + kProgram + " sleep " +
             marks)},
        kClean}});
  killer.join();
  EXPECT_EQ(ended[0].exit_code, exit_code) << ended[0].output;
  ASSERT_EQ(pids.size(), 4u);
  for (const auto pid : pids) {
    const Stopwatch watch;
    while (alive(pid) && watch.seconds() < 20) { // init may be slow to reap it
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
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

TEST(Run, PassesEveryWordOnAsItIs) {
  const auto ended = run({"run", "-n", "1", "--", kProgram, "echo", "[1,2]", "", "--", "-n", "{}"});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(
      contains(ended.output, "[rank 0] [1,2]\n[rank 0] \n[rank 0] --\n[rank 0] -n\n[rank 0] {}\n"));
}

TEST(Run, AChattyRankHidesNoFailure) {
  const Stopwatch watch;
  const auto ended = run_script(
      kTool + " run -n 2 -- sh -c '[ $RANK = 0 ] && exec yes; sleep 1; exit 3' > /dev/null");
  EXPECT_EQ(ended.exit_code, 3) << ended.output;
  EXPECT_LT(watch.seconds(), 15);
}

/// A pipe that the launcher can write to as file descriptor `write_end`.
struct Pipe {
  Pipe() {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    read_end = ends[0];
    write_end = ends[1];
  }
  ~Pipe() {
    close(read_end);
    close(write_end);
  }
  std::string redirection() const {
    return " >&" + std::to_string(write_end);
  }
  int read_end = -1;
  int write_end = -1;
};

TEST(Run, ASlowReaderOfANonBlockingPipeGetsEverything) {
  Pipe pipe;
  fcntl(pipe.write_end, F_SETFL, O_NONBLOCK);
  std::string text;
  std::thread reader([&] {
    char buffer[1 << 14];
    for (ssize_t size; (size = read(pipe.read_end, buffer, sizeof(buffer))) > 0;) {
      text.append(buffer, size);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  const auto ended = run_script(kTool + " run -n 2 -- seq 200000" + pipe.redirection());
  close(std::exchange(pipe.write_end, -1));
  reader.join();
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 400000);
  EXPECT_EQ(count(text, "] 200000\n"), 2);
}

TEST(Run, CanBeEndedWhileNobodyReadsItsOutput) {
  const Pipe pipe;
  const Stopwatch watch;
  const auto ended = run_and_send("-n 2 -- yes" + pipe.redirection(), {"TERM", "TERM"});
  EXPECT_EQ(ended.exit_code, 143);
  EXPECT_TRUE(contains(ended.output, "ended by Terminated"));
  EXPECT_LT(watch.seconds(), 15);
}

TEST(Run, EndsWhenItsReaderIsGone) {
  const auto ended = run_script("{ " + kTool + " run -n 2 -- yes; echo code $? >&2; } | head -n 1");
  EXPECT_TRUE(contains(ended.output, "code 141\n"));
  EXPECT_TRUE(contains(ended.output, "the output cannot be written: Broken pipe"));
}

TEST(Run, CanBeEndedWhileItWaitsForNode0) {
  const auto nodes =
      "-n 1 --nnodes 2 --node-rank 1 --master 127.0.0.1:" + std::to_string(free_port()) +
      " -- true";
  const Stopwatch watch;
  EXPECT_EQ(run_and_send(nodes, {"INT"}).exit_code, 130);
  EXPECT_EQ(run_and_send(nodes, {"TERM"}).exit_code, 143);
  EXPECT_LT(watch.seconds(), 20);
}

// Another program listens where node 0 should, and does not answer.
TEST(Run, ASignalEndsALauncherThatHangsInACall) {
  const auto stranger = detail::listen_on("127.0.0.1", 0);
  const Stopwatch watch;
  const auto ended = run_and_send(
      "-n 1 --nnodes 2 --node-rank 1 --master 127.0.0.1:" + std::to_string(stranger.port) +
          " -- true",
      {"TERM"});
  EXPECT_EQ(ended.exit_code, 128 + SIGTERM) << ended.output;
  EXPECT_TRUE(contains(ended.output, "ended by Terminated, while a store did not answer"));
  EXPECT_LT(watch.seconds(), 30);
}

TEST(Run, TellsExitCodesFromSignals) {
  const auto ended = run({"run", "-n", "1", "--", "sh", "-c", "printf why >&2; exit 200"});
  EXPECT_EQ(ended.exit_code, 200);
  EXPECT_TRUE(contains(ended.output, "rank 0 failed first, with exit code 200"));
  EXPECT_TRUE(contains(ended.output, "its last lines on stderr:\n  why\n"));
}

TEST(Run, ARankThatWasAskedToEndIsNoFailure) {
  // Whoever got a signal would not say "done".
  const auto ended = run(
      {"run", "-n", "3", "--", "sh", "-c",
       "[ $RANK = 1 ] && exit 143; sleep 2; echo done; exit 143"});
  EXPECT_EQ(ended.exit_code, 143) << ended.output;
  EXPECT_EQ(count(ended.output, "done\n"), 2) << ended.output;
  EXPECT_EQ(count(ended.output, "fsdp run:"), 0) << ended.output;
  // Not every rank has to be one of them.
  const auto one = run({"run", "-n", "2", "--", "sh", "-c", "[ $RANK = 1 ] && exit 130; sleep 1"});
  EXPECT_EQ(one.exit_code, 130) << one.output;
  EXPECT_EQ(one.output, "");
}

TEST(Run, ARankThatWasKilledIsAFailureAndSoIsOneThatFailsLater) {
  const auto killed =
      run({"run", "-n", "2", "--", "sh", "-c", "[ $RANK = 1 ] && kill -TERM $$; sleep 60"});
  EXPECT_EQ(killed.exit_code, 143) << killed.output;
  EXPECT_TRUE(contains(killed.output, "rank 1 failed first, with signal 15 (Terminated)"));
  const auto later = run(
      {"run", "-n", "3", "--", "sh", "-c",
       "[ $RANK = 1 ] && exit 143; [ $RANK = 0 ] && sleep 60; sleep 1; exit 3"});
  EXPECT_EQ(later.exit_code, 3) << later.output;
  EXPECT_TRUE(contains(later.output, "rank 2 failed first, with exit code 3"));
}

TEST(Run, APersonsSignalGoesToEveryRankOnce) {
  const auto folder = temporary_folder();
  const auto script = folder + "/rank.sh";
  std::ofstream(script) << "trap 'echo asked; [ $RANK = 0 ] && exit 143' TERM\n"
                           "touch $1/ready$RANK\n"
                           "for i in 1 2 3 4 5 6 7 8; do sleep 0.5; done\n"
                           "exit 143\n";
  const auto ended = run_script(
      "cd " + folder + "; " + kTool + " run -n 2 -- bash rank.sh . & until [ -e " + folder +
      "/ready0 ] && [ -e " + folder + "/ready1 ]; do sleep 0.1; done; kill -TERM $!; wait $!");
  EXPECT_EQ(ended.exit_code, 143) << ended.output;
  EXPECT_EQ(count(ended.output, "] asked\n"), 2) << ended.output;
  EXPECT_EQ(count(ended.output, "failed"), 0) << ended.output;
}

TEST(Run, SaysWhyAFileCannotBeRun) {
  const auto folder = temporary_folder();
  const auto script = folder + "/script";
  std::ofstream(script) << "echo hello\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  for (const auto& [program, reason] : std::map<std::string, std::string>{
           {folder, "it is not a file"}, {script, "Exec format error; a script needs"}}) {
    SCOPED_TRACE(program);
    const auto ended = run({"run", "-n", "2", "--", program});
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_TRUE(contains(ended.output, "cannot run " + program + ": " + reason));
  }
}

TEST(Run, ACarriageReturnEndsALine) {
  const auto ended =
      run({"run", "-n", "1", "--", "printf", "\\r10%%\\r20%%\\r\\ndone\\r\\n\\r\\nend"});
  EXPECT_EQ(ended.output, "[rank 0] 10%\n[rank 0] 20%\n[rank 0] done\n[rank 0] \n[rank 0] end\n");
}

TEST(Run, AnEndlessLineComesInPieces) {
  const auto ended =
      run({"run", "-n", "1", "--", "sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x; exit 4"});
  EXPECT_EQ(ended.exit_code, 4);
  const auto marks = count(ended.output, "[rank 0] x");
  EXPECT_GE(marks, 10);
  EXPECT_LE(marks, 17);
  EXPECT_EQ(
      std::count(ended.output.begin(), ended.output.end(), 'x'), 1000000 + 1); // and in "exit"
}

TEST(Run, NodesMustAgreeOnTheJob) {
  const auto port = std::to_string(free_port());
  const auto node = [&](const std::string& rank, const std::string& ranks) {
    return Command{
        {kTool, "run", "-n", ranks, "--nnodes", "2", "--node-rank", rank, "--master",
         "127.0.0.1:" + port, "--", "sleep", "60"},
        kClean};
  };
  std::string output;
  for (const auto& ended : run_commands({node("0", "2"), node("1", "1")})) {
    EXPECT_NE(ended.exit_code, 0) << ended.output;
    EXPECT_FALSE(ended.timed_out);
    output += ended.output;
  }
  EXPECT_TRUE(contains(output, "was started for 2 nodes of "));
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

TEST(Run, ALimitOfTheSystemIsNamedWithTheRemedy) {
  const auto ended = run_script("ulimit -n 24; " + kTool + " run -n 32 -- sleep 30");
  EXPECT_EQ(ended.exit_code, 2) << ended.output;
  EXPECT_TRUE(contains(
      ended.output,
      "32 ranks need 224 open files, and 24 are allowed; raise the limit (ulimit -n 224), or "));
}

} // namespace
} // namespace fsdp::test
