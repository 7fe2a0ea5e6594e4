// `fsdp report`: the page, what it is made of, and how it looks in a browser.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <fstream>
#include <set>

#include "cli/tool.h"

namespace fsdp::test {
namespace {

using Json = nlohmann::json;

Ended python(std::vector<std::string> words) {
  words.insert(words.begin(), FSDP_TEST_PYTHON);
  return run_commands({{words, kClean}})[0];
}

/// A folder with the files of a run that never was.
std::string sample_run() {
  const auto folder = temporary_folder() + "/headers-4x";
  const auto ended = python({FSDP_TEST_DIR "/cli/report_sample.py", folder});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  return folder;
}

void write(const std::string& path, const std::string& text) {
  std::ofstream(path) << text;
}

/// What the page is given.
Json data_in(const std::string& folder) {
  const auto page = file_text(folder + "/report.html");
  const std::string begin = "<script id=\"data\" type=\"application/json\">";
  const auto from = page.find(begin) + begin.size();
  return Json::parse(page.substr(from, page.find("</script>", from) - from));
}

TEST(Report, HoldsTheRunAndOneStepOfItsTrace) {
  const auto folder = sample_run();
  const auto ended = run({"report", folder + "/"});
  ASSERT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_NE(ended.output.find("report.html"), std::string::npos) << ended.output;
  const auto page = file_text(folder + "/report.html");
  EXPECT_EQ(page.find("@REPORT_"), std::string::npos);
  const auto data = data_in(folder);
  EXPECT_EQ(data["name"], "headers-4x");
  EXPECT_EQ(data["config"]["mesh"], "dp=2,shard=2");
  EXPECT_EQ(data["metrics"].size(), 205); // 200 steps, 5 validations
  EXPECT_EQ(data["groups"].size(), 7);
  std::set<int> ranks;
  for (const auto& event : data["trace"]) {
    if (event.value("cat", "") == "step") {
      EXPECT_TRUE(ranks.insert(event["pid"].get<int>()).second) << "more than one step";
    }
  }
  EXPECT_EQ(ranks, (std::set{0, 1, 2, 3}));
  EXPECT_LT(page.size(), 400'000);
}

TEST(Report, OpensInABrowserWideAndNarrowLightAndDark) {
  const auto folder = sample_run();
  ASSERT_EQ(run({"report", folder}).exit_code, 0);
  const auto ended = python({FSDP_TEST_DIR "/cli/report_page.py", folder + "/report.html"});
  if (ended.exit_code == 77) {
    GTEST_SKIP() << ended.output;
  }
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
}

TEST(Report, TakesTheLaterOfTwoLinesAndLeavesACutOneOut) {
  const auto folder = temporary_folder();
  write(
      folder + "/metrics.jsonl", R"({"step": 1, "loss": 3.0})"
                                 "\n"
                                 R"({"step": 2, "loss": 9.0})"
                                 "\n"
                                 R"({"step": 2, "loss": 2.0, "note": "</script><b>"})"
                                 "\n"
                                 R"({"step": 2, "validation_loss": 2.5})"
                                 "\n"
                                 R"({"step": 3, "lo)");
  const auto ended = run({"report", folder});
  ASSERT_EQ(ended.exit_code, 0) << ended.output;
  const auto metrics = data_in(folder)["metrics"];
  ASSERT_EQ(metrics.size(), 3);
  EXPECT_EQ(metrics[1]["loss"], 2.0);
  EXPECT_EQ(metrics[1]["note"], "</script><b>");
  EXPECT_EQ(metrics[2]["validation_loss"], 2.5);
}

TEST(Report, NamesWhatCannotBeRead) {
  const auto folder = temporary_folder();
  const auto expect_refused = [&](const std::string& path, const std::string& message) {
    const auto ended = run({"report", path});
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_NE(ended.output.find(message), std::string::npos) << ended.output;
  };
  expect_refused(folder + "/none", "there is no folder");
  expect_refused(folder, "is not the folder of a run: it has no metrics.jsonl");
  write(folder + "/metrics.jsonl", "nonsense\n{\"stepp\": 2}\n");
  expect_refused(folder, "metrics.jsonl line 1 is not an object with a step");
}

TEST(Report, LeavesOutWhatIsDamagedAndSaysSo) {
  const auto folder = temporary_folder();
  write(
      folder + "/metrics.jsonl",
      "{\"step\": 1, \"loss\": 1}\nnonsense\n{\"step\": \"2\"}\n"
      "{\"step\": 1.5}\n{\"step\": 3, \"loss\": 1}\n");
  const auto expect_warned = [&](const std::string& message) {
    const auto ended = run({"report", folder});
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    EXPECT_NE(ended.output.find(message), std::string::npos) << ended.output;
    EXPECT_EQ(data_in(folder)["metrics"].size(), 2) << message;
  };
  expect_warned("metrics.jsonl line 2 is not an object with a step, nor are 2 more; left out");
  write(folder + "/groups.json", "[1,");
  expect_warned("groups.json is damaged, and left out of the page: ");
  write(folder + "/groups.json", "{}");
  expect_warned("groups.json is not a list of groups; it is left out of the page");
  write(folder + "/config.json", "[]");
  expect_warned("config.json is not an object of options; it is left out of the page");
  for (const auto* trace :
       {R"({"traceEvents": [{"ph": "X", "cat": "step", "ts": 1, "dur": 2}]})", "{\"traceEv"}) {
    SCOPED_TRACE(trace);
    write(folder + "/trace.json", trace);
    expect_warned("trace.json is damaged, and left out of the page: ");
    EXPECT_TRUE(data_in(folder)["trace"].is_null());
  }
}

TEST(Report, AFullDiskHasItsCode) {
  if (run_script("test -w /dev/full").exit_code != 0) {
    GTEST_SKIP() << "no /dev/full here";
  }
  const auto folder = temporary_folder();
  write(folder + "/metrics.jsonl", "{\"step\": 1, \"loss\": 1}\n");
  run_script("ln -s /dev/full " + folder + "/report.html.new");
  const auto ended = run({"report", folder});
  EXPECT_EQ(ended.exit_code, 4) << ended.output;
  EXPECT_NE(ended.output.find("report.html cannot be written: No space left"), std::string::npos)
      << ended.output;
}

} // namespace
} // namespace fsdp::test
