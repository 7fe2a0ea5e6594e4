// What ends `fsdp train` from outside: ranks that were started differently, a folder that is in
// use, signals, a disk that is full.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "cli/tiny_run.h"
#include "support/tensors.h"

namespace fsdp::test {
namespace {

// ------------------------------------------------------------ Ranks that were started differently

/// Runs two ranks, of which rank 1 has more options.
Ended with_other_rank(const std::string& words, const std::string& more) {
  return run_script(
      kTool + " run -n 2 -- bash -c 'if [ $RANK = 1 ]; then exec " + kTool + words + " " + more +
      "; else exec " + kTool + words + "; fi'");
}

TEST(RanksAgree, OnEveryOptionThatDecidesTheRun) {
  const auto words = joined(tiny(text_file()));
  const std::vector<std::pair<std::string, std::string>> others{
      {"--lr 2e-3", "--lr is 0.01 on rank 0 and 0.002 on rank 1"},
      {"--seed 7 --clip 3", "--clip is 1.0 on rank 0 and 3.0 on rank 1; --seed is 1 on rank 0 and"},
      {"--steps 31", "--steps is 30 on rank 0 and 31 on rank 1"},
      {"--weight-decay 0.5", "--weight-decay is "},
      {"--save-every 7", "--save-every is 3 on rank 0 and 7 on rank 1"},
      {"--run elsewhere", "--run is "},
      {"--offload", "--offload is false on rank 0 and true on rank 1"}};
  for (const auto& [more, message] : others) {
    SCOPED_TRACE_OF(more);
    const auto ended = with_other_rank(words, more);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(contains(ended.output, "the ranks were started differently: " + message))
        << ended.output;
  }
}

TEST(RanksAgree, OnTheTextAndNotOnItsPath) {
  const auto folder = temporary_folder();
  const auto data = text_file();
  const auto words = joined(tiny_options(data, {"--steps", "2", "--no-save"}));
  run_script(
      "cp " + data + " " + folder + "/same; (cat " + data + "; echo more) > " + folder + "/other");
  const auto same = with_other_rank(words, "--data " + folder + "/same");
  EXPECT_EQ(same.exit_code, 0) << same.output;
  const auto other = with_other_rank(words, "--data " + folder + "/other");
  EXPECT_EQ(other.exit_code, 2) << other.output;
  EXPECT_TRUE(contains(other.output, "differently: the text of --data is ")) << other.output;
}

// ------------------------------------------------------------ A folder that is in use

/// Waits in the shell, for half a minute at most, until a command succeeds.
std::string wait_until(const std::string& command) {
  return "for i in {1..1500}; do " + command + " && break; sleep 0.02; done; ";
}

/// Starts a run that does not end, and calls `then` once it has made a step. Kills the run.
std::string beside_a_run(const std::string& run_folder, const std::string& then) {
  return kTool +
         joined(tiny_options(
             text_file(),
             {"--run", run_folder, "--steps", "100000", "--ranks", "1", "--save-every", "20"})) +
         " > /dev/null & run=$!; " + wait_until("[ -s " + run_folder + "/metrics.jsonl ]") + then +
         " kill -9 $run; wait $run;";
}

TEST(RunLock, ASecondRunIsToldWhoHasTheFolder) {
  const auto run_folder = temporary_folder() + "/run";
  const auto again = kTool + joined(tiny_options(text_file(), {"--steps", "2", "--quiet"}));
  const auto ended = run_script(beside_a_run(
      run_folder, again + " --run " + run_folder + "; echo code $? not $run; " + kTool +
                      " train --resume " + run_folder + "; echo code $?;"));
  EXPECT_EQ(count(ended.output, "code 4"), 2) << ended.output;
  EXPECT_EQ(count(ended.output, "another run writes to " + run_folder + ": process "), 2);
  EXPECT_TRUE(contains(ended.output, "; wait for its end, end it, or use another --run. If its"));
  EXPECT_TRUE(contains(ended.output, ", since 20")) << ended.output;
}

TEST(RunLock, IsNamedWhenTheRunHasACheckpoint) {
  const auto run_folder = temporary_folder() + "/run";
  const auto again = kTool + joined(tiny_options(text_file(), {"--run", run_folder, "--quiet"}));
  const auto ended = run_script(beside_a_run(
      run_folder, wait_until("ls " + run_folder + "/checkpoints 2>&1 | grep -q '^step_'") + again +
                      "; echo code $?;"));
  EXPECT_TRUE(contains(ended.output, "code 4")) << ended.output;
  EXPECT_TRUE(contains(ended.output, "another run writes to " + run_folder + ": process "));
}

TEST(RunLock, IsFreeWhenItsRunWasKilledAndGoneWhenItHasEnded) {
  const auto run_folder = temporary_folder() + "/run";
  const auto ended = run_script(
      beside_a_run(run_folder, "ls " + run_folder + "/lock;") + kTool + " train --resume " +
      run_folder + " --steps $(($(grep -c grad_norm " + run_folder +
      "/metrics.jsonl) + 3)) --quiet; echo code $?; ls " + run_folder);
  EXPECT_TRUE(contains(ended.output, "code 0\n")) << ended.output;
  EXPECT_EQ(count(ended.output, "lock"), 1) << ended.output;
}

// ------------------------------------------------------------ Signals

/// Starts a long run, waits until it has done a step, and sends it `signals`.
Ended interrupted(
    const std::string& words, const std::string& run_folder, const std::string& send) {
  return run_script(
      kTool + words + " & " + wait_until("[ -s " + run_folder + "/metrics.jsonl ]") + send +
      " wait $!");
}

TEST(TrainSignals, FinishesTheStepSavesAndGoesOnLater) {
  const auto data = text_file();
  for (const auto& [name, code] : {std::pair("INT", 130), std::pair("TERM", 143)}) {
    SCOPED_TRACE(name);
    const auto run_folder = temporary_folder() + "/run";
    const auto words = joined(
        tiny_options(data, {"--run", run_folder, "--steps", "100000", "--schedule", "constant"}));
    // bash lets its background jobs ignore SIGINT; the tool handles it all the same.
    const auto ended = interrupted(words, run_folder, std::string("kill -") + name + " $!;");
    EXPECT_EQ(ended.exit_code, code) << ended.output;
    EXPECT_TRUE(contains(ended.output, std::string("stopped   by SIG") + name + " after step "));
    EXPECT_TRUE(
        contains(ended.output, "; to resume: " + kPrintedTool + " train --resume " + run_folder));
    const auto done = metrics_of(run_folder).size();
    const auto rest =
        run({"train", "--resume", run_folder, "--steps", std::to_string(done + 2), "--quiet"});
    EXPECT_EQ(rest.exit_code, 0) << rest.output;
    EXPECT_EQ(metrics_of(run_folder).size(), done + 2);
  }
}

TEST(TrainSignals, UnderALauncherTheRanksSaveToo) {
  const auto run_folder = temporary_folder() + "/run";
  const auto words = joined(tiny_options(
      text_file(), {"--run", run_folder, "--steps", "100000", "--schedule", "constant"}));
  const auto ended = interrupted(" run -n 2 -- " + kTool + words, run_folder, "kill -INT $!;");
  EXPECT_EQ(ended.exit_code, 130) << ended.output;
  EXPECT_EQ(count(ended.output, "stopped   by SIGINT after step "), 1) << ended.output;
  const auto done = metrics_of(run_folder).size();
  const auto rest =
      run({"train", "--resume", run_folder, "--steps", std::to_string(done + 1), "--quiet"});
  EXPECT_EQ(rest.exit_code, 0) << rest.output;
}

TEST(TrainSignals, ASecondOneQuitsAtOnce) {
  const auto run_folder = temporary_folder() + "/run";
  const auto words = joined(tiny_options(
      text_file(), {"--run", run_folder, "--steps", "100000", "--model", "small", "--batch", "256",
                    "--accumulate", "4", "--context", "128", "--dim", "256"})); // takes seconds
  const auto ended = interrupted(words, run_folder, "kill -TERM $!; sleep 0.7; kill -INT $!;");
  EXPECT_EQ(ended.exit_code, 130) << ended.output;
  EXPECT_EQ(count(ended.output, "stopped"), 0) << ended.output;
}

TEST(TrainSignals, NanStopsEveryRankWithANameAndACodeOfItsOwn) {
  for (const auto& launcher : {std::string(), " run -n 2 -- " + kTool}) {
    const auto ended =
        run_script(kTool + launcher + joined(tiny(text_file(), {"--lr", "1e30", "--clip", "0"})));
    EXPECT_EQ(ended.exit_code, 5) << ended.output;
    EXPECT_TRUE(
        contains(ended.output, "gradient that is not finite is that of embed_tokens.weight"));
    EXPECT_EQ(count(ended.output, "[rank 1] fsdp"), 0) << ended.output; // one says it for all
    EXPECT_EQ(count(ended.output, "result "), 0) << ended.output;
  }
}

TEST(TrainSignals, AFullDiskIsSaidClearly) {
  if (run_script("test -w /dev/full").exit_code != 0) {
    GTEST_SKIP() << "no /dev/full here";
  }
  const auto run_folder = temporary_folder() + "/run";
  run_script("mkdir " + run_folder + "; ln -s /dev/full " + run_folder + "/config.json.new");
  const auto ended =
      run(tiny_options(text_file(), {"--run", run_folder, "--steps", "2", "--quiet"}));
  EXPECT_EQ(ended.exit_code, 4) << ended.output;
  EXPECT_TRUE(contains(ended.output, run_folder + "/config.json cannot be written: No space left"));
}

TEST(TrainSignals, EndAWaitForRanksThatDoNotCome) {
  const auto ended = run_script(
      "export RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" +
      std::to_string(free_port()) + "; " + kTool + joined(tiny(text_file())) +
      " & sleep 3; kill -TERM $!; start=$SECONDS; wait $!; code=$?; "
      "[ $((SECONDS - start)) -le 5 ] && echo in time; exit $code");
  EXPECT_EQ(ended.exit_code, 143) << ended.output;
  EXPECT_TRUE(contains(ended.output, "in time\n")) << ended.output;
  EXPECT_TRUE(contains(ended.output, "fsdp: SIGTERM came before the first step\n"));
}

/// Starts a long run over two processes, whose ids are in RUN-0 and RUN-1, stops rank 1 once the
/// run has made a step, and calls `then`.
Ended with_rank_1_stopped(const std::string& run_folder, const std::string& then) {
  const auto words = joined(tiny_options(text_file(), {"--run", run_folder, "--steps", "100000"}));
  return interrupted(
      " run -n 2 -- bash -c 'echo $$ > " + run_folder + "-$RANK; exec " + kTool + words + "'",
      run_folder, "kill -STOP $(cat " + run_folder + "-1); " + then);
}

TEST(TrainSignals, EndAWaitForARankThatHangs) {
  const auto run_folder = temporary_folder() + "/run";
  // The signal goes to rank 0, which waits for rank 1.
  const auto ended = with_rank_1_stopped(
      run_folder, "sleep 1; kill -TERM $(cat " + run_folder +
                      "-0); start=$SECONDS; wait $!; code=$?; "
                      "[ $((SECONDS - start)) -le 12 ] && echo in time; exit $code;");
  EXPECT_EQ(ended.exit_code, 143) << ended.output;
  EXPECT_TRUE(contains(ended.output, "in time\n")) << ended.output;
  EXPECT_TRUE(contains(ended.output, "SIGTERM, but the run does not get to the end of its step"))
      << ended.output;
  const auto rest = run(
      {"train", "--resume", run_folder, "--quiet", "--steps",
       std::to_string(metrics_of(run_folder).size())});
  EXPECT_EQ(rest.exit_code, 0) << rest.output;
}

TEST(TrainSignals, AStoppedRankObeysTheLauncher) {
  const auto run_folder = temporary_folder() + "/run";
  const auto ended = with_rank_1_stopped(run_folder, "kill -TERM $!;");
  EXPECT_EQ(ended.exit_code, 143) << ended.output;
  EXPECT_TRUE(contains(ended.output, "stopped   by SIGTERM after step ")) << ended.output;
}

TEST(TrainSignals, ASignalThatTimeoutSendsTwiceIsOne) {
  const auto run_folder = temporary_folder() + "/run";
  const auto ended = run_script(
      "timeout 6 " + kTool +
      joined(
          tiny_options(text_file(), {"--run", run_folder, "--steps", "1000000", "--ranks", "2"})));
  EXPECT_EQ(ended.exit_code, 124) << ended.output;
  EXPECT_TRUE(contains(ended.output, "stopped   by SIGTERM after step ")) << ended.output;
}

// ------------------------------------------------------------ Slow disks, clocks that jump

/// Runs the tool with fault_shim.cpp, whose variables are `faults`, and goes on with `then` in the
/// shell. LD_PRELOAD cannot name a path with a space, so the library is copied.
Ended run_with_faults(
    const std::string& faults, const std::string& words, const std::string& then = "") {
  const auto library = temporary_folder() + "/shim.so";
  const auto ended = run_script(
      "cp " FSDP_BIN_DIR "/fault_shim.so " + library + "; export " + faults +
      " LD_PRELOAD=" + library + " ASAN_OPTIONS=verify_asan_link_order=0; " +
      "grep -q shim.so /proc/self/maps && echo the shim is loaded; " + kTool + words + then);
  EXPECT_TRUE(contains(ended.output, "the shim is loaded"));
  return ended;
}

/// The losses of a run's steps, to the last bit.
std::vector<double> losses_of(const std::string& run_folder) {
  std::vector<double> losses;
  for (const auto& line : metrics_of(run_folder)) {
    losses.push_back(line["loss"]);
  }
  EXPECT_FALSE(losses.empty()) << run_folder;
  return losses;
}

/// A run over two processes.
std::string saving_run(
    const std::string& data,
    const std::string& folder,
    const char* steps,
    const char* save_every = "5") {
  return joined({"run", "-n", "2", "--", kTool}) +
         joined(tiny_options(
             data, {"--run", folder, "--steps", steps, "--save-every", save_every, "--warmup", "2",
                    "--schedule", "constant"}));
}

std::string until_it_saves(const std::string& run_folder) {
  return wait_until("ls " + run_folder + "/checkpoints 2>&1 | grep -q fsdp-saving");
}

TEST(SlowDisk, TrainingGoesOnBesideASave) {
  const auto data = text_file();
  const auto folder = temporary_folder();
  const auto plain = run_script(kTool + saving_run(data, folder + "/plain", "300", "100"));
  EXPECT_EQ(plain.exit_code, 0) << plain.output;
  const auto lines = "$(wc -l < " + folder + "/slow/metrics.jsonl)";
  const auto slow = run_with_faults(
      "FSDP_TEST_SYNC_MS=300", saving_run(data, folder + "/slow", "300", "100"),
      " & " + until_it_saves(folder + "/slow") + "before=" + lines + "; while ls " + folder +
          "/slow/checkpoints | grep -q fsdp-saving; do [ " + lines +
          " -gt $before ] && echo a step beside the save && break; sleep 0.02; done; wait $!");
  EXPECT_EQ(slow.exit_code, 0) << slow.output;
  EXPECT_TRUE(contains(slow.output, "a step beside the save")) << slow.output;
  EXPECT_EQ(losses_of(folder + "/slow"), losses_of(folder + "/plain"));
  const auto verified = run({"verify", folder + "/slow"});
  EXPECT_EQ(verified.exit_code, 0) << verified.output;
}

TEST(SlowDisk, ASignalWaitsForTheSaveAndLosesNothing) {
  const auto folder = temporary_folder() + "/run";
  const auto ended = run_with_faults(
      "FSDP_TEST_SYNC_MS=300", saving_run(text_file(), folder, "100000"),
      " & " + until_it_saves(folder) + "kill -TERM $!; wait $!");
  EXPECT_EQ(ended.exit_code, 143) << ended.output;
  const auto done = std::to_string(metrics_of(folder).size());
  const auto newest = folder + "/checkpoints/step_" + std::string(8 - done.size(), '0') + done;
  const auto verified = run({"verify", newest});
  EXPECT_EQ(verified.exit_code, 0) << verified.output;
}

TEST(Clock, JumpsChangeNothing) {
  const auto data = text_file();
  const auto folder = temporary_folder();
  const auto plain = run_script(kTool + saving_run(data, folder + "/plain", "60"));
  EXPECT_EQ(plain.exit_code, 0) << plain.output;
  for (const char* steps : {"30", "60"}) { // the second one goes on from the newest checkpoint
    const auto jumping = run_with_faults(
        "FSDP_TEST_CLOCK_JUMPS=1", saving_run(data, folder + "/jumping", steps) + " --go-on");
    EXPECT_EQ(jumping.exit_code, 0) << jumping.output;
  }
  EXPECT_EQ(losses_of(folder + "/jumping"), losses_of(folder + "/plain"));
}

} // namespace
} // namespace fsdp::test
