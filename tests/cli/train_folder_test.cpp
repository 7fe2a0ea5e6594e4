// What a run of `fsdp train` leaves on disk, on meshes and under a launcher.
#include <set>

#include "cli/tiny_run.h"
#include "support/tensors.h"

namespace fsdp::test {
namespace {

using Json = nlohmann::json;

Json json_of(const std::string& path) {
  return Json::parse(std::ifstream(path));
}

Ended train_in(const std::string& folder, std::vector<std::string> more) {
  static const auto data = text_file();
  more.insert(more.begin(), {"--run", folder, "--steps", "8", "--quiet"});
  const auto ended = run(tiny_options(data, more));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  return ended;
}

void expect_same_losses(const std::string& folder, const std::string& other) {
  const auto losses = metrics_of(folder);
  const auto others = metrics_of(other);
  ASSERT_EQ(losses.size(), 8u);
  ASSERT_EQ(others.size(), 8u);
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_NEAR(losses[i]["loss"], others[i]["loss"], 1e-4) << other << ", step " << i + 1;
  }
}

/// What TensorBoard itself reads, by tag: pairs of a step and a value.
Json events_in(const std::string& folder) {
  const auto read = run_commands(
      {{{FSDP_TEST_PYTHON, FSDP_TEST_DIR "/cli/read_events.py", folder + "/tensorboard"}, {}}})[0];
  EXPECT_EQ(read.exit_code, 0) << read.output;
  const auto json = read.output.rfind("\n{") + 1; // after warnings, if there are some
  return Json::parse(read.output.substr(json));
}

std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    lines.push_back(line);
  }
  return lines;
}

/// A step that a resumed run makes again is there once, with its last value.
TEST(TrainFolder, TableAndEventsHaveTheMetricsAlsoAfterAResume) {
  const auto reader = run_commands({{{FSDP_TEST_PYTHON, "-c", "import tensorboard"}, {}}})[0];
  if (reader.exit_code != 0) {
    GTEST_SKIP() << "tensorboard is not installed";
  }
  const auto folder = temporary_folder() + "/run";
  train_in(
      folder, {"--ranks", "2", "--csv", "--tensorboard", "--save-every", "4", "--validate-every",
               "4", "--peak-tflops", "2"});
  const auto first = metrics_of(folder);
  std::filesystem::remove_all(folder + "/checkpoints/step_00000008"); // steps 5 to 8 are lost
  const auto ended = run({"train", "--resume", folder, "--lr", "2e-3", "--quiet"});
  ASSERT_EQ(ended.exit_code, 0) << ended.output;
  const auto steps = metrics_of(folder);
  ASSERT_EQ(steps.size(), 8u);
  EXPECT_NE(steps[7]["loss"], first[7]["loss"]);
  EXPECT_DOUBLE_EQ(steps[7]["mfu"].get<double>(), steps[7]["flops_per_s"].get<double>() / 1e12);

  const auto events = events_in(folder);
  ASSERT_EQ(events["train/loss"].size(), 8u) << events;
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(events["train/loss"][i][0], i + 1);
    EXPECT_FLOAT_EQ(events["train/loss"][i][1].get<float>(), steps[i]["loss"].get<float>());
    EXPECT_FLOAT_EQ(
        events["memory/peak_bytes"][i][1].get<float>(), steps[i]["memory"]["peak"].get<float>());
  }
  ASSERT_EQ(events["validation/loss"].size(), 2u) << events;
  EXPECT_EQ(events["validation/loss"][1][0], 8);

  const auto table = lines_of(folder + "/metrics.csv");
  ASSERT_EQ(table.size(), 1 + 8 + 2u); // a header, steps and validations
  EXPECT_TRUE(table[0].starts_with("step,loss,validation_loss,grad_norm,lr,")) << table[0];
  EXPECT_TRUE(table[1].starts_with("1," + steps[0]["loss"].dump() + ",,")) << table[1];
  EXPECT_TRUE(table[9].starts_with("8," + steps[7]["loss"].dump() + ",,")) << table[9];
  EXPECT_TRUE(table[10].starts_with("8,,")) << table[10];
}

TEST(TrainFolder, HoldsConfigGroupsMetricsTimelineAndReport) {
  const auto folder = temporary_folder() + "/run";
  train_in(folder, {"--mesh", "dp=2,shard=2", "--validate-every", "4", "--peak-tflops", "2"});
  EXPECT_EQ(json_of(folder + "/config.json")["mesh"], "dp=2,shard=2");
  EXPECT_EQ(json_of(folder + "/groups.json").size(), 3u);

  const auto validations = metrics_of(folder, "validation_loss");
  ASSERT_EQ(validations.size(), 2u);
  EXPECT_EQ(validations[0]["step"], 4);
  EXPECT_LT(validations[1]["validation_loss"], validations[0]["validation_loss"]);
  for (const auto& step : metrics_of(folder)) {
    EXPECT_GT(step["exposed_s"], 0);
    EXPECT_LT(step["exposed_s"], step["seconds"]);
  }

  std::map<std::string, std::set<int>> ranks; // by category
  const auto trace = json_of(folder + "/trace.json");
  for (const auto& event : trace["traceEvents"]) {
    ranks[event.value("cat", event.value("ph", ""))].insert(event["pid"].get<int>());
  }
  for (const auto* category :
       {"step", "forward", "backward", "optimizer", "all_gather", "reduce_scatter", "all_reduce",
        "waiting", "C"}) {
    EXPECT_EQ(ranks[category].size(), 4u) << category;
  }
  EXPECT_NE(file_text(folder + "/report.html").find("\"mfu\":"), std::string::npos);
  const auto looked = run_commands(
      {{{FSDP_TEST_PYTHON, FSDP_TEST_DIR "/cli/report_page.py", folder + "/report.html"},
        kClean}})[0];
  EXPECT_TRUE(looked.exit_code == 0 || looked.exit_code == 77) << looked.output; // 77: no Chromium
}

TEST(TrainFolder, MeshesAndProcessesGiveTheLossesOfOneRank) {
  const auto folder = temporary_folder();
  train_in(folder + "/one", {"--ranks", "1"});
  for (const std::vector<std::string>& mesh :
       {std::vector<std::string>{"--ranks", "2"},
        {"--ranks", "4"},
        {"--ranks", "8"},
        {"--mesh", "dp=2,shard=2"},
        {"--mesh", "dp=2,shard=2,tp=2"}}) {
    const auto other = folder + "/" + mesh[1];
    train_in(other, mesh);
    expect_same_losses(folder + "/one", other);
  }
  for (const std::string mesh : {"shard=2", "dp=2,shard=2", "shard=2,tp=2"}) {
    const auto other = folder + "/gloo-" + mesh;
    const auto words = joined(
        tiny_options(text_file(), {"--run", other, "--steps", "8", "--quiet", "--mesh", mesh}));
    const auto ranks = mesh == "shard=2" ? "2" : "4";
    const auto ended = run_script(kTool + " run -n " + ranks + " -- " + kTool + words);
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    expect_same_losses(folder + "/one", other);
  }
}

TEST(TrainFolder, ARunThatGoesOnKeepsItsMetricsAndReport) {
  const auto folder = temporary_folder() + "/run";
  train_in(folder, {"--ranks", "2"});
  const auto ended = run(
      {"train", "--resume", folder, "--steps", "12", "--quiet", "--ranks", "3", "--batch", "12"});
  EXPECT_NE(ended.exit_code, 0); // another batch is another run
  ASSERT_EQ(run({"train", "--resume", folder, "--steps", "12", "--quiet"}).exit_code, 0);
  const auto steps = metrics_of(folder);
  ASSERT_EQ(steps.size(), 12u);
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i]["step"], i + 1);
  }
  EXPECT_EQ(metrics_of(folder, "validation_loss").size(), 2u);
}

TEST(TrainFolder, ADiskThatGetsFullEndsTheRunAndCostsNoCheckpoint) {
  const auto folder = temporary_folder() + "/run";
  train_in(folder, {"--ranks", "2"});
  // Files that may not grow: the metrics are short, a checkpoint is not.
  const auto full = run_script(
      "trap '' XFSZ; ulimit -f 64; " + kTool + " train --resume " + folder +
      " --steps 12 --save-every 2");
  EXPECT_EQ(full.exit_code, 4) << full.output;
  EXPECT_TRUE(contains(full.output, "fsdp: ")); // whichever file was the first
  EXPECT_TRUE(contains(full.output, "cannot "));
  const auto freed = run({"train", "--resume", folder, "--steps", "12", "--quiet"});
  EXPECT_EQ(freed.exit_code, 0) << freed.output;
  EXPECT_EQ(metrics_of(folder).size(), 12u);
}

} // namespace
} // namespace fsdp::test
