// `fsdp run --restarts`: a job that goes on after a rank or a machine was lost.
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "cli/tiny_run.h"
#include "support/tensors.h"

namespace fsdp::test {
namespace {

const std::string kAttempt = "$TORCHELASTIC_RESTART_COUNT";

/// Runs a shell script as every rank.
Ended run_job(const std::vector<std::string>& options, const std::string& script) {
  std::vector<std::string> words{"run"};
  words.insert(words.end(), options.begin(), options.end());
  words.insert(words.end(), {"--", "bash", "-c", script});
  return run(words);
}

TEST(Restarts, StartTheJobAgainOnAllRanks) {
  const auto ended = run_job(
      {"-n", "3", "--restarts", "5"},
      "echo attempt " + kAttempt + " of $WORLD_SIZE; [ " + kAttempt +
          " -lt 2 ] || exit 0; [ $RANK = 1 ] && kill -9 $$; sleep 60");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(contains(ended.output, "fsdp run: rank 1 failed first, with signal 9 (Killed)"));
  EXPECT_TRUE(contains(ended.output, "fsdp run: restart 1 of 5, on 3 ranks.\n")) << ended.output;
  EXPECT_TRUE(contains(ended.output, "fsdp run: restart 2 of 5, on 3 ranks.\n")) << ended.output;
  EXPECT_EQ(count(ended.output, "attempt 2 of 3\n"), 3) << ended.output;
}

TEST(Restarts, LeaveLostRanksOutDownToTheLeast) {
  const auto ended = run_job(
      {"-n", "4", "--restarts", "5", "--min-ranks", "2"},
      "echo world $WORLD_SIZE; [ " + kAttempt +
          " -lt 3 ] || exit 0; [ $RANK = 0 ] && exit 9; sleep 60");
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  for (const auto* line :
       {"restart 1 of 5, on 3 ranks", "restart 2 of 5, on 2 ranks", "restart 3 of 5, on 2 ranks"}) {
    EXPECT_TRUE(contains(ended.output, line)) << line << ended.output;
  }
}

TEST(Restarts, EndWithTheirNumber) {
  const auto ended = run_job({"-n", "2", "--restarts", "1"}, "[ $RANK = 1 ] && exit 9; sleep 60");
  EXPECT_EQ(ended.exit_code, 9) << ended.output;
  EXPECT_TRUE(contains(ended.output, "not started again: no restart is left of 1.\n"))
      << ended.output;
}

TEST(Restarts, AreNotForWrongUseNorForSignals) {
  const auto wrong = run_job({"-n", "2", "--restarts", "3"}, "[ $RANK = 1 ] && exit 2; sleep 60");
  EXPECT_EQ(wrong.exit_code, 2) << wrong.output;
  EXPECT_EQ(count(wrong.output, "restart "), 0) << wrong.output;
  const auto asked =
      run_script(kTool + " run -n 2 --restarts 3 -- sleep 60 & sleep 1; kill -TERM $!; wait $!");
  EXPECT_EQ(asked.exit_code, 143) << asked.output;
  EXPECT_EQ(count(asked.output, "restart "), 0) << asked.output;
}

// ------------------------------------------------------------ Several machines

/// The launcher of one of two machines, as a line of a shell.
std::string node(int rank, int port, const std::string& options, const std::string& script) {
  return kTool + " run -n 2 --nnodes 2 --restarts 5 --node-rank " + std::to_string(rank) +
         " --master 127.0.0.1:" + std::to_string(port) + " " + options + " -- bash " + script;
}

TEST(Restarts, LaunchersAgreeOnWhatIsLeft) {
  const auto folder = temporary_folder();
  const auto script = folder + "/rank.sh";
  std::ofstream(script) << "echo attempt " + kAttempt + " rank $RANK of $WORLD_SIZE\n" + "touch " +
                               folder + "/$RANK-" + kAttempt + "\n" + "if [ " + kAttempt +
                               " = 0 ]; then sleep 60; fi\n";
  // The second machine is lost, and the first one goes on alone.
  const auto port = free_port();
  const auto alone = run_script(
      node(0, port, "--min-ranks 1", script) + " & first=$!; " +
      node(1, port, "--min-ranks 1", script) + " > /dev/null & for i in {1..500}; do [ -e " +
      folder + "/3-0 ] && break; sleep 0.02; done; kill -9 $!; sleep 0.5; kill -9 $(pgrep -P " +
      "$first | head -1); wait $first");
  EXPECT_EQ(alone.exit_code, 0) << alone.output;
  EXPECT_TRUE(contains(alone.output, "restart 1 of 5, on 1 ranks")) << alone.output;
  EXPECT_TRUE(contains(alone.output, "attempt 1 rank 0 of 1\n")) << alone.output;
}

TEST(Restarts, AMachineThatComesBackTakesPartAgain) {
  const auto folder = temporary_folder();
  const auto script = folder + "/rank.sh";
  // The first attempts go on until the other machine was lost, and is back.
  std::ofstream(script) << "echo attempt " + kAttempt + " rank $RANK of $WORLD_SIZE\n" + "touch " +
                               folder + "/$RANK-" + kAttempt + "\n" + "if [ " + kAttempt +
                               " -lt 2 ]; then sleep 60; fi\n";
  const auto port = free_port();
  const auto options = std::string("--min-ranks 2");
  const auto back = run_script(
      node(0, port, options, script) + " & first=$!; " + node(1, port, options, script) +
      " > /dev/null & for i in {1..500}; do [ -e " + folder +
      "/3-0 ] && break; sleep 0.02; done; kill -9 $!; kill -9 $(pgrep -P $first | head -1); "
      "for i in {1..2000}; do [ -e " +
      folder + "/0-1 ] && break; sleep 0.02; done; " + node(1, port, options, script) +
      "; wait $first");
  EXPECT_EQ(back.exit_code, 0) << back.output;
  EXPECT_TRUE(contains(back.output, "attempt 1 rank 0 of 2\n")) << back.output;
  EXPECT_TRUE(contains(back.output, "on another node: node 1 is back")) << back.output;
  EXPECT_EQ(count(back.output, "attempt 2 rank "), 4) << back.output;
}

// ------------------------------------------------------------ Training goes on

/// A rank's script: rank 1 of the first attempts is killed once the run has made enough steps.
std::string killed_on_the_way(
    const std::string& folder, const std::string& words, const std::string& run_folder) {
  const auto script = folder + "/rank.sh";
  std::ofstream(script) << escaped(kTool) + words + " --run " + run_folder + " &\n" +
                               "if [ $RANK = 1 ] && [ " + kAttempt + " -lt 2 ]; then\n" +
                               "  for i in {1..3000}; do\n" + "    [ \"$(grep -c grad_norm " +
                               run_folder + "/metrics.jsonl)\" -gt $((7 + 9 * " + kAttempt +
                               ")) ] && break\n" + "    sleep 0.01\n  done\n  kill -9 $!\nfi\n" +
                               "wait $!\n";
  return script;
}

/// An undisturbed run in FOLDER/whole, and one in FOLDER/run whose ranks are killed on the way.
struct TwoRuns {
  TwoRuns(const std::string& folder, const std::string& ranks, std::vector<std::string> job) {
    const auto words = joined(tiny_options(text_file(), {"--device", "cpu"}));
    whole = run_script(kTool + words + " --ranks " + ranks + " --run " + folder + "/whole");
    EXPECT_EQ(whole.exit_code, 0) << whole.output;
    job.insert(job.begin(), "run");
    const auto script = killed_on_the_way(folder, words, folder + "/run");
    job.insert(job.end(), {"--restarts", "4", "--", "bash", script});
    ended = run(job);
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
  }

  Ended whole;
  Ended ended;
};

TEST(Restarts, TrainingEndsWithTheResultOfAnUndisturbedRun) {
  const auto folder = temporary_folder();
  const auto [whole, ended] = TwoRuns(folder, "2", {"-n", "2"});
  EXPECT_TRUE(contains(ended.output, "restart 2 of 4, on 2 ranks")) << ended.output;
  EXPECT_EQ(result_in(ended.output), result_in(whole.output)) << ended.output;
  EXPECT_TRUE(contains(ended.output, "lost      ")) << ended.output;
  EXPECT_EQ(metrics_of(folder + "/run").size(), 30u);
  EXPECT_GE(metrics_of(folder + "/run", "lost_steps").size(), 1u);
}

TEST(Restarts, TrainingGoesOnAtAnyNumberOfRanks) {
  const auto folder = temporary_folder();
  // 8 rows are 3 + 3 + 2 for three ranks.
  const auto [whole, ended] = TwoRuns(folder, "1", {"-n", "4", "--min-ranks", "2"});
  EXPECT_TRUE(contains(ended.output, "restart 1 of 4, on 3 ranks")) << ended.output;
  EXPECT_TRUE(contains(ended.output, "restart 2 of 4, on 2 ranks")) << ended.output;
  const auto losses = metrics_of(folder + "/run");
  const auto others = metrics_of(folder + "/whole");
  ASSERT_EQ(losses.size(), others.size());
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_NEAR(losses[i]["loss"].get<double>(), others[i]["loss"].get<double>(), 2e-4) << i;
  }
}

TEST(Restarts, TakeTheNextOlderCheckpointWhereTheNewestIsDamaged) {
  const auto folder = temporary_folder();
  const auto run_folder = folder + "/run";
  const auto words =
      tiny_options(text_file(), {"--run", run_folder, "--save-every", "10", "--keep", "9"});
  const auto whole = run(words);
  ASSERT_EQ(whole.exit_code, 0) << whole.output;
  run_script(
      "f=" + run_folder + "/checkpoints/step_00000030/rank_00001.safetensors; " +
      "printf x | dd of=$f bs=1 seek=$(($(stat -c %s $f) - 9)) conv=notrunc status=none");
  auto again = words;
  again.push_back("--go-on");
  const auto ended = run(again);
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(contains(
      ended.output,
      "fsdp: warning: the run goes on from " + run_folder + "/checkpoints/step_00000020 instead\n"))
      << ended.output;
  EXPECT_EQ(result_in(ended.output), result_in(whole.output)) << ended.output;
}

TEST(Restarts, NeedAFolderThatTheRunFindsAgain) {
  const auto ended =
      run(tiny_options(text_file(), {"--restarts", "2", "--ranks", "2", "--device", "cpu"}));
  EXPECT_EQ(ended.exit_code, 2) << ended.output;
  EXPECT_TRUE(contains(
      ended.output,
      "a job that may start again needs a folder that it finds again; give --run FOLDER"));
}

} // namespace
} // namespace fsdp::test
