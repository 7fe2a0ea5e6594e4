// `fsdp train` saves, and goes on where it was.
#include <fsdp/checkpoint.h>
#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include <filesystem>

#include "cli/tiny_run.h"
#include "cli/train/run_checkpoint.h"
#include "support/tensors.h"

namespace fsdp::test {
namespace {

std::vector<std::string> short_run(const std::string& data, std::vector<std::string> more) {
  more.insert(more.begin(), {"--steps", "20", "--ranks", "2"});
  return tiny(data, more);
}

/// The bytes of a file, which must be there.
std::string text_in(const std::string& path) {
  EXPECT_FALSE(file_text(path).empty()) << path;
  return file_text(path);
}

/// Names in a folder.
std::string listing(const std::string& folder) {
  return run_script("echo -n $(ls " + folder + ")").output;
}

std::string step_folder(const std::string& run, const std::string& step) {
  return run + "/checkpoints/step_" + std::string(8 - step.size(), '0') + step;
}

/// The tensors of all ranks, among them the last losses, and the values.
std::vector<std::string> contents(const std::string& checkpoint, int ranks) {
  std::vector<std::string> texts;
  for (int rank = 0; rank < ranks; ++rank) {
    texts.push_back(text_in(checkpoint + "/rank_0000" + std::to_string(rank) + ".safetensors"));
  }
  const auto manifest = text_in(checkpoint + "/manifest.json"); // ids and times differ
  const auto values = manifest.find("\"values\"");
  EXPECT_NE(values, std::string::npos);
  texts.push_back(manifest.substr(std::min(values, manifest.size())));
  return texts;
}

struct ResumedRun : testing::TestWithParam<std::string> {
  bool is_low_precision() const {
    return GetParam() == "low_precision";
  }
  std::vector<std::string> saving_run(const std::string& folder) const {
    std::vector<std::string> words{"--run", folder, "--save-every", "10"};
    const auto optimizer =
        is_low_precision() ? std::vector<std::string>{"--shard-dtype", "bf16", "--moments", "8bit"}
                           : std::vector<std::string>{"--optimizer", GetParam()};
    words.insert(words.end(), optimizer.begin(), optimizer.end());
    return short_run(text_file(), words);
  }
};
INSTANTIATE_TEST_SUITE_P(
    Optimizer, ResumedRun, testing::Values("adamw", "muon", "low_precision"), [](const auto& info) {
      return info.param;
    });

TEST_P(ResumedRun, RepeatsTheUninterruptedRunBitForBit) {
  const auto folder = temporary_folder();
  const auto whole = run(saving_run(folder + "/a"));
  ASSERT_EQ(whole.exit_code, 0) << whole.output;
  EXPECT_TRUE(contains(whole.output, "saved     " + step_folder(folder + "/a", "20")));
  const auto rest =
      run({"train", "--resume", step_folder(folder + "/a", "10"), "--run", folder + "/b"});
  ASSERT_EQ(rest.exit_code, 0) << rest.output;
  EXPECT_TRUE(contains(rest.output, ": 10 steps done, by 2 ranks\n"));
  const auto losses = losses_in(whole.output);
  ASSERT_EQ(losses.size(), 20u);
  EXPECT_EQ(losses_in(rest.output), std::vector<double>(losses.begin() + 10, losses.end()));
  EXPECT_EQ(result_in(rest.output), result_in(whole.output));
  EXPECT_TRUE(
      contents(step_folder(folder + "/a", "20"), 2) ==
      contents(step_folder(folder + "/b", "20"), 2));
}

TEST_P(ResumedRun, AtOtherNumbersOfRanks) {
  const auto folder = temporary_folder();
  const auto whole = run(saving_run(folder + "/a"));
  const auto losses = losses_in(whole.output);
  ASSERT_EQ(losses.size(), 20u) << whole.output;
  for (const std::string ranks : {"1", "4"}) {
    const auto rest =
        run({"train", "--resume", step_folder(folder + "/a", "10"), "--ranks", ranks, "--no-save"});
    const auto others = losses_in(rest.output);
    ASSERT_EQ(others.size(), 10u) << rest.output;
    for (size_t i = 0; i < others.size(); ++i) {
      EXPECT_NEAR(others[i], losses[10 + i], is_low_precision() ? 0.03 : 2e-4)
          << ranks << " ranks, step " << i + 11;
    }
  }
}

TEST(TrainResume, SavesStepsThatWereLostOnceTheyAreMadeAgain) {
  const auto folder = temporary_folder() + "/run";
  const auto whole =
      run(short_run(text_file(), {"--run", folder, "--save-every", "8", "--keep", "9"}));
  ASSERT_EQ(whole.exit_code, 0) << whole.output;
  std::filesystem::remove_all(step_folder(folder, "20"));
  const auto rest = run({"train", "--resume", folder, "--steps", "30"});
  ASSERT_EQ(rest.exit_code, 0) << rest.output;
  EXPECT_EQ(
      listing(folder + "/checkpoints"),
      "latest step_00000008 step_00000016 step_00000020 step_00000024 step_00000030");
}

TEST(TrainResume, AfterKill9) {
  const auto folder = temporary_folder();
  const auto data = text_file();
  const auto words = joined(tiny(data, {"--steps", "24", "--ranks", "2"}));
  const auto whole = run_script(kTool + words);
  ASSERT_EQ(whole.exit_code, 0) << whole.output;
  for (const std::string step : {"3", "11"}) {
    SCOPED_TRACE_OF(step);
    const auto run_folder = folder + "/" + step;
    const auto killed = run_script(
        kTool + words + " --save-every 1 --keep 100 --run " + run_folder + " > /dev/null & " +
        "for i in {1..1500}; do [ -e " + step_folder(run_folder, step) +
        " ] && break; sleep 0.02; done; kill -9 $!; wait $!");
    EXPECT_EQ(killed.exit_code, 137) << killed.output;
    const auto rest = run({"train", "--resume", run_folder});
    EXPECT_EQ(rest.exit_code, 0) << rest.output;
    EXPECT_EQ(result_in(rest.output), result_in(whole.output)) << rest.output;
  }
}

// Without any option for it: before the first checkpoint, and between two.
TEST(TrainResume, AfterKill9AtAnyMoment) {
  const auto folder = temporary_folder();
  const auto words = joined(tiny(text_file(), {"--steps", "60", "--ranks", "2"}));
  const auto whole = run_script(kTool + words);
  ASSERT_EQ(whole.exit_code, 0) << whole.output;
  for (const std::string steps : {"0", "1", "7", "33"}) {
    SCOPED_TRACE_OF(steps);
    const auto run_folder = folder + "/" + steps;
    const auto killed = run_script(
        kTool + words + " --run " + run_folder +
        " > /dev/null & for i in {1..3000}; do [ \"$(cat " + run_folder +
        "/metrics.jsonl 2> /dev/null | wc -l)\" -ge " + steps + " -a -e " + run_folder +
        "/metrics.jsonl ] && break; sleep 0.01; done; kill -9 $!; wait $!");
    EXPECT_EQ(killed.exit_code, 137) << killed.output;
    const auto rest = run({"train", "--resume", run_folder});
    EXPECT_EQ(rest.exit_code, 0) << rest.output;
    EXPECT_EQ(result_in(rest.output), result_in(whole.output)) << rest.output;
    const bool begins_again = contains(rest.output, ": no checkpoint yet, so it begins again\n");
    if (steps != "7") { // then the first one may not lie there yet
      EXPECT_EQ(begins_again, steps != "33") << rest.output;
    }
    EXPECT_EQ(run_script("grep -c grad_norm " + run_folder + "/metrics.jsonl").output, "60\n");
  }
}

TEST(TrainResume, KeepsWhatTheRunWasToldForItsFolder) {
  const auto run_folder = temporary_folder() + "/run";
  const auto first = run(short_run(
      text_file(), {"--run", run_folder, "--save-every", "5", "--keep", "2", "--keep-every", "10",
                    "--validate-every", "4", "--reshard-after-forward", "false", "--quiet"}));
  ASSERT_EQ(first.exit_code, 0) << first.output;
  const auto config = text_in(run_folder + "/config.json");
  ASSERT_EQ(run({"train", "--resume", run_folder, "--quiet"}).exit_code, 0);
  EXPECT_EQ(text_in(run_folder + "/config.json"), config);
  const auto longer = run({"train", "--resume", run_folder, "--steps", "36", "--keep", "3"});
  ASSERT_EQ(longer.exit_code, 0) << longer.output;
  EXPECT_EQ(
      listing(run_folder + "/checkpoints"),
      "latest step_00000010 step_00000020 step_00000030 step_00000035 step_00000036");
  EXPECT_TRUE(contains(longer.output, "after step 32\n"));
  EXPECT_TRUE(contains(text_in(run_folder + "/config.json"), "\"keep\": 3"));
}

TEST(TrainResume, NamesAnotherCheckpointWhereTheNewestIsDamaged) {
  const auto run_folder = temporary_folder() + "/run";
  ASSERT_EQ(
      run(short_run(text_file(), {"--run", run_folder, "--save-every", "10", "--quiet"})).exit_code,
      0);
  const auto file = step_folder(run_folder, "20") + "/rank_00001.safetensors";
  auto bytes = text_in(file);
  bytes[bytes.size() - 100] ^= 4;
  std::ofstream(file, std::ios::binary) << bytes;
  const auto damaged = run({"train", "--resume", run_folder});
  EXPECT_EQ(damaged.exit_code, 4) << damaged.output;
  EXPECT_TRUE(contains(damaged.output, "rank_00001.safetensors"));
  const auto advice = "to resume from another one: --resume " + step_folder(run_folder, "10");
  EXPECT_TRUE(contains(damaged.output, advice));
  const auto rest = run({"train", "--resume", step_folder(run_folder, "10"), "--no-save"});
  EXPECT_EQ(rest.exit_code, 0) << rest.output;
}

TEST(TrainResume, AFinishedRunShowsItsResultAgainAndMayGoOn) {
  const auto run_folder = temporary_folder() + "/run";
  const auto whole =
      run(short_run(text_file(), {"--run", run_folder, "--save-every", "0", "--quiet"}));
  EXPECT_EQ(listing(run_folder + "/checkpoints"), "latest step_00000020");
  const auto metrics = text_in(run_folder + "/metrics.jsonl");
  const auto again = run({"train", "--resume", run_folder, "--quiet"});
  EXPECT_EQ(result_in(again.output), result_in(whole.output));
  EXPECT_EQ(text_in(run_folder + "/metrics.jsonl"), metrics);
  const auto longer = run({"train", "--resume", run_folder, "--steps", "24"});
  EXPECT_EQ(losses_in(longer.output).size(), 4u) << longer.output;
  EXPECT_EQ(listing(run_folder + "/checkpoints"), "latest step_00000020 step_00000024");
}

TEST(TrainResume, KeepsTheNewestAndEveryMth) {
  const auto run_folder = temporary_folder() + "/run";
  const auto ended = run(short_run(
      text_file(),
      {"--run", run_folder, "--save-every", "3", "--keep", "2", "--keep-every", "6", "--quiet"}));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_EQ(
      listing(run_folder + "/checkpoints"),
      "latest step_00000006 step_00000012 step_00000018 step_00000020");
}

TEST(TrainResume, WhatCannotBeWrittenIsAnError) {
  const auto words = joined(short_run(text_file(), {"--quiet"}));
  for (const auto& command : {words, std::string(" doctor")}) {
    SCOPED_TRACE(command);
    const auto ended = run_script(kTool + command + " > /dev/full");
    EXPECT_EQ(ended.exit_code, 1) << ended.output;
    EXPECT_TRUE(contains(ended.output, "cannot write to standard output"));
  }
  const auto limited =
      run_script("ulimit -f 60; " + kTool + joined(short_run(text_file(), {"--quiet"})));
  EXPECT_EQ(limited.exit_code, 4) << limited.output;
  EXPECT_TRUE(contains(limited.output, "File too large"));
}

TEST(TrainResume, RanksAsProcessesThatItStartsItself) {
  const auto folder = temporary_folder();
  const auto threads = run(short_run(text_file(), {}));
  const auto processes = run(short_run(text_file(), {"--run", folder + "/a", "--processes"}));
  ASSERT_EQ(processes.exit_code, 0) << processes.output;
  EXPECT_TRUE(contains(processes.output, " 2 over gloo; "));
  const auto losses = losses_in(processes.output);
  const auto others = losses_in(threads.output);
  ASSERT_EQ(losses.size(), others.size());
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_NEAR(losses[i], others[i], 2e-4) << "step " << i + 1;
  }
  const auto rest =
      run({"train", "--resume", folder + "/a/", "--run", folder + "/a", "--steps", "22"});
  EXPECT_EQ(rest.exit_code, 0) << rest.output;
  EXPECT_TRUE(contains(rest.output, " 2 over gloo; "));
  EXPECT_EQ(run(short_run(text_file(), {"--processes", "--dim", "7"})).exit_code, 2);
  const auto json = run(short_run(text_file(), {"--processes", "--json"}));
  std::istringstream lines(json.output);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_TRUE(line.starts_with("{\"event\":")) << line;
  }
  EXPECT_TRUE(contains(json.output, "\"event\":\"result\""));
}

TEST(TrainResume, UnderALauncherARunHasOneFolderWithItsDate) {
  const auto folder = temporary_folder();
  const auto words = joined(tiny_options(text_file(), {"--steps", "6"}));
  const auto in_folder = "cd " + folder + "; " + kTool;
  EXPECT_EQ(run_script(in_folder + words + " --quiet --no-save").exit_code, 0);
  EXPECT_EQ(listing(folder), "");
  const auto saved = run_script(in_folder + " run -n 2 -- " + kTool + words + " --save-every 4");
  EXPECT_EQ(saved.exit_code, 0) << saved.output;
  EXPECT_EQ(listing(folder + "/runs/*/checkpoints"), "latest step_00000004 step_00000006");
  const auto rest = run_script(
      in_folder + " run -n 2 -- " + kTool +
      " train --no-save --resume runs/*/checkpoints/step_00000004");
  EXPECT_EQ(rest.exit_code, 0) << rest.output;
  EXPECT_EQ(result_in(rest.output), result_in(saved.output));
}

TEST(TrainResume, RefusesACheckpointOfAnotherRun) {
  const auto folder = temporary_folder();
  const auto run_folder = folder + "/run";
  ASSERT_EQ(run(short_run(text_file(), {"--run", run_folder, "--quiet"})).exit_code, 0);
  const auto refused = [&](std::vector<std::string> words, const std::string& part) {
    words.insert(words.begin(), "train");
    const auto ended = run(words);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(contains(ended.output, part));
  };
  const auto refused_with = [&](const std::string& option, const std::string& value,
                                const std::string& part) {
    refused({"--resume", run_folder, option, value}, part);
  };
  refused_with("--dim", "64", "--dim 64: " + step_folder(run_folder, "20") + " is of a run with ");
  refused_with("--layers", "3", "with --layers 2; leave it out to continue that run");
  refused_with("--heads", "2", "with --heads 4");
  refused_with("--batch", "4", "with --batch 8");
  refused_with("--context", "16", "with --context 32");
  refused_with("--seed", "2", "with --seed 1");
  refused_with("--steps", "19", "--steps 19: ");
  refused_with("--ranks", "3", "--batch 8 rows cannot be shared evenly by 3 ranks");
  const auto other = folder + "/other.txt";
  std::ofstream(other) << std::string(5000, 'x');
  refused_with("--data", other, "--data: the text of " + other + " is not the one that ");
  refused({"--run", run_folder}, "earlier run; continue that run with --resume ");
  refused({"--resume", folder}, "--resume: " + folder + " is not a checkpoint, and ");
  refused({"--resume", folder}, " has no complete one");
  refused({"--keep", "0"}, "--keep 0: it must be 1 or more");
  refused({"--keep-every", "-1"}, "--keep-every -1: it must be 0 or more");
  refused({"--save-every", "-1"}, "--save-every -1: it must be 0 or more");
}

/// What a killed save leaves, by a process of this machine that is dead.
void leave_dead_save(const std::string& folder) {
  EXPECT_EQ(
      run_script(
          "mkdir -p " + folder + "/id/data && echo -n \"process 1 on $(hostname) since x\" > " +
          folder + "/lock")
          .exit_code,
      0);
}

TEST(TrainResume, SaysWhichNewerCheckpointItSkips) {
  const auto run_folder = temporary_folder() + "/run";
  ASSERT_EQ(
      run(short_run(text_file(), {"--run", run_folder, "--save-every", "10", "--quiet"})).exit_code,
      0);
  const auto newest = step_folder(run_folder, "20");
  for (const auto& words : std::vector<std::vector<std::string>>{
           {"convert", newest, newest, "--overwrite"},
           {"convert", run_folder, newest, "--overwrite", "--format", "sharded", "--dtype", "bf16"},
           {"convert", step_folder(run_folder, "10"), newest, "--overwrite", "--format",
            "sharded"}}) {
    const auto refused = run(words);
    EXPECT_EQ(refused.exit_code, 2) << refused.output;
    EXPECT_TRUE(contains(refused.output, newest + " is a checkpoint of a training run, which "));
    EXPECT_TRUE(contains(refused.output, "write to another folder"));
  }
  const auto same = run({"convert", newest, newest, "--overwrite", "--format", "sharded"});
  EXPECT_EQ(same.exit_code, 0) << same.output;
  const auto good = run({"train", "--resume", run_folder, "--quiet"});
  EXPECT_EQ(good.exit_code, 0) << good.output;
  EXPECT_FALSE(contains(good.output, "skipped"));
  leave_dead_save(run_folder + "/checkpoints/step_00000015.fsdp-saving");
  std::ofstream(newest + "/manifest.json") << "{}";
  const auto damaged = run({"train", "--resume", run_folder, "--quiet"});
  EXPECT_EQ(damaged.exit_code, 0) << damaged.output;
  EXPECT_TRUE(contains(damaged.output, "a newer checkpoint is skipped: " + newest));
  EXPECT_TRUE(contains(damaged.output, "is damaged"));
  EXPECT_TRUE(contains(damaged.output, "going on from " + step_folder(run_folder, "10")));
  EXPECT_EQ(listing(run_folder + "/checkpoints"), "latest step_00000010 step_00000020");
}

TEST(Generate, TakesWhatInspectTakesAndWhatConvertWrites) {
  const auto run_folder = temporary_folder() + "/run";
  ASSERT_EQ(run(short_run(text_file(), {"--run", run_folder, "--quiet"})).exit_code, 0);
  const auto generated = [&](const std::string& path) {
    return run({"generate", "--checkpoint", path, "--prompt", "for (int i", "--tokens", "8"});
  };
  const auto checkpoint = step_folder(run_folder, "20");
  const auto text = generated(checkpoint);
  EXPECT_EQ(text.exit_code, 0) << text.output;
  for (const auto& folder : {run_folder, run_folder + "/checkpoints"}) {
    const auto same = generated(folder);
    EXPECT_EQ(same.exit_code, 0) << same.output;
    EXPECT_EQ(same.output, text.output);
    EXPECT_EQ(run({"inspect", folder}).exit_code, 0);
    EXPECT_EQ(run({"verify", folder}).exit_code, 0);
  }
  const auto out = run_folder + "/../out";
  ASSERT_EQ(
      run({"convert", run_folder, out, "--format", "sharded", "--only", "(model|config)\\..*"})
          .exit_code,
      0);
  EXPECT_EQ(generated(out).output, text.output);
  const auto resumed = run({"train", "--resume", out, "--no-save"});
  EXPECT_EQ(resumed.exit_code, 4) << resumed.output;
  EXPECT_TRUE(contains(resumed.output, "not one of fsdp train"));
  ASSERT_EQ(run({"convert", run_folder, out + "_hf"}).exit_code, 0);
  EXPECT_EQ(generated(out + "_hf").output, text.output);
  EXPECT_EQ(generated(out + "_hf/model.safetensors").output, text.output);
  const auto refused = run({"train", "--resume", out + "_hf", "--no-save"});
  EXPECT_EQ(refused.exit_code, 2) << refused.output;
  EXPECT_TRUE(contains(refused.output, "also use --format sharded"));
}

TEST(TrainResume, SaysWhereItCannotSave) {
  const auto folder = temporary_folder();
  std::ofstream(folder + "/file") << "in the way";
  const auto ended = run(short_run(text_file(), {"--run", folder + "/file", "--quiet"}));
  EXPECT_EQ(ended.exit_code, 4) << ended.output;
  EXPECT_TRUE(contains(ended.output, folder + "/file"));
}

// ------------------------------------------------------------ In this process

/// All digits of the losses, which the tool does not print.
std::vector<double> train_on(
    cli::Trainer& trainer, cli::RunState& run, const cli::RunIdentity& identity, int64_t until) {
  std::vector<double> losses;
  while (run.step < until) {
    losses.push_back(trainer.step(run.step).loss);
    run.add(losses.back());
  }
  if (until == identity.config.steps) {
    losses.push_back(trainer.validation_loss());
  }
  return losses;
}

TEST(TrainResume, LossesAreTheSameToTheLastBit) {
  const auto path = temporary_folder() + "/checkpoint";
  const auto corpus = cli::Corpus::read(text_file());
  cli::RunIdentity identity;
  identity.config.model = {.dim = 16, .layers = 2, .heads = 4, .kv_heads = 2, .hidden = 32};
  identity.config.context = 16;
  identity.config.batch = 8;
  identity.config.steps = 12;
  identity.fingerprint = corpus.fingerprint();
  std::vector<double> whole;
  run_ranks(2, [&](int rank) {
    cli::Trainer trainer(identity.config, corpus);
    cli::RunState run;
    auto losses = train_on(trainer, run, identity, 6);
    save(cli::make_run_state_dict(trainer, run, identity), path);
    const auto rest = train_on(trainer, run, identity, 12);
    losses.insert(losses.end(), rest.begin(), rest.end());
    if (rank == 0) {
      whole = losses;
    }
  });
  ASSERT_EQ(whole.size(), 13u);
  const auto saved = cli::find_saved_run(path);
  EXPECT_EQ(saved.step, 6);
  EXPECT_EQ(saved.ranks, 2);
  EXPECT_FALSE(saved.is_latest);
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [&](int rank) {
      cli::Trainer trainer(identity.config, corpus);
      cli::RunState run;
      cli::load_run(saved, trainer, run);
      const auto rest = train_on(trainer, run, identity, 12);
      for (size_t i = 0; rank == 0 && i < rest.size(); ++i) {
        if (ranks == 2) {
          EXPECT_EQ(rest[i], whole[6 + i]) << "step " << i + 7;
        } else {
          EXPECT_NEAR(rest[i], whole[6 + i], 1e-4) << ranks << " ranks, step " << i + 7;
        }
      }
    });
  }
}

} // namespace
} // namespace fsdp::test
