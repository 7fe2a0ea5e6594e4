// The fuzzer itself: that it finds what is wrong, makes it smaller, and finds nothing else.
#include <gtest/gtest.h>

#include "cli/fuzz/case.h"
#include "cli/fuzz/program.h"
#include "cli/fuzz/python.h"
#include "cli/fuzz/run.h"
#include "cli/fuzz/shrink.h"
#include "cli/tool.h"
#include "support/tensors.h"

namespace fsdp::cli::fuzz {
namespace {

using test::contains;

Case one_linear() {
  Case c;
  c.root.blocks = {{.kind = Kind::Linear}};
  return c;
}

TEST(FuzzCases, DependOnTheirSeedAlone) {
  EXPECT_TRUE(draw_case(7) == draw_case(7));
  EXPECT_FALSE(draw_case(7) == draw_case(8));
}

TEST(FuzzCases, AreTidy) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto c = draw_case(seed);
    auto again = c;
    tidy(again);
    EXPECT_TRUE(again == c) << seed;
  }
}

TEST(FuzzRun, FindsATamperedGradient) {
  auto c = one_linear();
  const auto good = run_case(c);
  EXPECT_FALSE(good.failure) << good.failure->message;
  EXPECT_GT(good.num_comparisons, 0);
  c.tamper = 1.001;
  const auto bad = run_case(c);
  ASSERT_TRUE(bad.failure);
  EXPECT_EQ(bad.failure->kind, "the gradients differ");
  EXPECT_TRUE(contains(bad.failure->message, "b0.weight in step 0 on rank"));
}

// Cases as they are drawn, each with a wrong gradient. A few have none that could be wrong.
TEST(FuzzRun, FindsTamperedGradientsInRandomCases) {
  int found = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    auto c = draw_case(seed);
    c.tamper = 3;
    found += run_case(c).failure ? 1 : 0;
  }
  EXPECT_GE(found, 14);
}

TEST(FuzzShrink, LeavesWhatTheFailureNeeds) {
  const auto recomputed = [](const Case& c) {
    bool found = false;
    for_each_block(
        c.root, [&](const Block& block, int) { found |= block.recomputed && block.group > 0; });
    return found && c.ranks >= 2;
  };
  int shrunk = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const auto c = draw_case(seed);
    if (recomputed(c)) {
      const auto small = shrink(c, recomputed);
      EXPECT_EQ(count_blocks(small.root), 2) << seed; // the root and one more
      EXPECT_EQ(small.groups.size(), 2U) << seed;
      EXPECT_EQ(small.ranks, 2) << seed;
      EXPECT_TRUE(small.steps == std::vector<Step>(1)) << seed;
      ++shrunk;
    }
  }
  EXPECT_GT(shrunk, 5);
}

TEST(FuzzShrink, OfARealFailure) {
  auto c = draw_case(2);
  c.tamper = 3;
  const auto failure = run_case(c).failure;
  ASSERT_TRUE(failure);
  const auto small = shrink(c, [&](const Case& smaller) {
    const auto outcome = run_case(smaller);
    return outcome.failure && outcome.failure->kind == failure->kind;
  });
  EXPECT_LE(count_blocks(small.root), 2);
  EXPECT_EQ(small.ranks, 1);
  EXPECT_EQ(small.steps.size(), 1U);
}

TEST(FuzzProgram, SaysWhatTheCaseSays) {
  auto c = one_linear();
  c.ranks = 4;
  c.groups.push_back({.mesh = Mesh::Hsdp, .reshard = 2, .param_dtype = c10::kBFloat16});
  c.root.blocks[0].group = 1;
  c.steps[0].events = {{.action = Action::EditShards}};
  c.steps[0].throws_in_forward = 1;
  const auto text = program(c, "the parameters differ\nby 1");
  for (const auto* part :
       {"// the parameters differ\n// by 1\n", "FSDP_MODULE(Net);", "fsdp::run_ranks(4, train);",
        "fsdp::init_device_mesh(torch::kCPU, {2, 2}, {\"replicate\", \"shard\"})",
        ".reshard_after_forward = 2", ".mp_policy = {.param_dtype = torch::kBFloat16}",
        "fsdp::as_dtensor(param).to_local().mul_(0.5);", "throws_in_forward = 1;"}) {
    EXPECT_TRUE(contains(text, part));
  }
}

TEST(FuzzPython, GetsAShareOfTheCases) {
  int fitting = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    fitting += fits_python(draw_case(seed)) ? 1 : 0;
  }
  EXPECT_GT(fitting, 20);
}

TEST(FuzzTool, ReportsAFailureAsAProgram) {
  const auto ended = test::run({"fuzz", "engine", "--case", "2", "--tamper", "3", "--no-python"});
  EXPECT_EQ(ended.exit_code, 1) << ended.output;
  EXPECT_TRUE(contains(ended.output, "the gradients differ"));
  EXPECT_TRUE(contains(ended.output, "int main() {"));
  EXPECT_TRUE(contains(ended.output, "fuzz engine --case 2"));
}

TEST(FuzzTool, FindsNothingInHalfAMinute) {
  auto environment = test::kClean;
  environment["FSDP_PYTHON"] = FSDP_TEST_PYTHON;
  const auto ended = test::run_commands(
      {{{test::kTool, "fuzz", "engine", "--seconds", "20", "--seed", "1"}, environment}})[0];
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(contains(ended.output, "failures  0"));
}

} // namespace
} // namespace fsdp::cli::fuzz
