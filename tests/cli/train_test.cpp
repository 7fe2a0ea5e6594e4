// `fsdp train`, from outside.
#include <gtest/gtest.h>

#include "cli/tiny_run.h"
#include "support/tensors.h"

namespace fsdp::test {
namespace {

TEST(Train, LearnsOverFourRanks) {
  const auto ended = run(tiny(text_file()));
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  const auto losses = losses_in(ended.output);
  ASSERT_EQ(losses.size(), 30u) << ended.output;
  EXPECT_GT(losses.front(), 5);
  EXPECT_LT(losses.back(), 2.5);
  for (const auto* part :
       {"model     ", "ranks     4 over threads; 3 groups, ", "text      ",
        "run       30 steps of 8 x 32 = 256 tokens", " tokens/s  ", " left\n", "result    loss 5.",
        "validation loss ",
        "byte frequencies alone: ", "sample    the model continues \"for (int i"}) {
    EXPECT_TRUE(contains(ended.output, part));
  }
  EXPECT_EQ(count(ended.output, "\x1b"), 0); // not a terminal
}

TEST(Train, TakesLibTorchsHeadersByDefault) {
  const auto ended = run(
      {"train", "--steps", "2", "--dim", "16", "--layers", "1", "--batch", "4", "--context", "8",
       "--no-save"});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_TRUE(contains(ended.output, "text      LibTorch's C++ headers: "));
}

TEST(Train, SameSeedSameLosses) {
  const auto data = text_file();
  const auto first = run(tiny(data));
  const auto second = run(tiny(data));
  EXPECT_EQ(losses_in(first.output), losses_in(second.output));
  EXPECT_EQ(result_in(first.output), result_in(second.output));
  const auto other = run(tiny(data, {"--seed", "2"}));
  EXPECT_NE(losses_in(first.output), losses_in(other.output));
}

TEST(Train, OneRankAndFourGiveTheSameLosses) {
  const auto data = text_file();
  const auto with_ranks = [&](const std::string& ranks) {
    // One rank has two threads, which on a busy machine spin for each other.
    return run_script("OMP_WAIT_POLICY=passive " + kTool + joined(tiny(data, {"--ranks", ranks})))
        .output;
  };
  expect_equal_losses(with_ranks("1"), with_ranks("4"));
}

TEST(Train, UnderALauncherItIsOneRankAndPrintsOnce) {
  const auto data = text_file();
  auto words = tiny(data);
  words.insert(words.begin(), {"run", "-n", "2", "--", kTool});
  const auto processes = run(words);
  EXPECT_EQ(processes.exit_code, 0) << processes.output;
  EXPECT_EQ(count(processes.output, "result "), 1) << processes.output;
  EXPECT_EQ(count(processes.output, "[rank 1]"), 0) << processes.output;
  EXPECT_TRUE(contains(processes.output, "[rank 0] ranks     2 over gloo; "));
  expect_equal_losses(processes.output, run(tiny(data, {"--ranks", "2"})).output);
}

TEST(Train, UnderALauncherBadOptionsAreRefusedByItsNumberOfRanks) {
  const auto data = text_file();
  const auto refused = [&](const std::vector<std::string>& more, const std::string& part) {
    auto words = tiny(data, more);
    words.insert(words.begin(), {"run", "-n", "2", "--", kTool});
    const auto ended = run(words);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(contains(ended.output, part)) << ended.output;
  };
  refused({"--ranks", "4"}, "--ranks 4: the launcher started 2; leave --ranks out");
  refused({"--batch", "7"}, "--batch 7 rows cannot be shared evenly by 2 ranks");
}

TEST(Train, QuietPrintsTheResultOnly) {
  const auto ended = run(tiny(text_file(), {"--quiet"}));
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.output.find("result    loss 5."), 0u) << ended.output;
  EXPECT_EQ(count(ended.output, "\n"), 1) << ended.output;
}

TEST(Train, OnATerminalTheProgressIsOneLine) {
  const auto data = text_file();
  const auto on_terminal = [&](const std::string& variables, const std::string& columns) {
    return run_script(
        variables + " script -qec 'stty cols " + columns + "; " + kTool + joined(tiny(data)) +
        "' /dev/null < /dev/null");
  };
  if (run_script("script --version").exit_code != 0) {
    GTEST_SKIP() << "script (util-linux) is not here to give us a terminal";
  }
  const auto colored = on_terminal("TERM=xterm", "130");
  EXPECT_EQ(colored.exit_code, 0);
  EXPECT_EQ(count(colored.output, "\r\x1b[Kstep "), 30) << colored.output;
  EXPECT_TRUE(contains(colored.output, "step 30/30  ####################  loss "));
  EXPECT_EQ(count(colored.output, " ms  "), 30) << colored.output;
  EXPECT_TRUE(contains(colored.output, "\x1b[1mresult    \x1b[0mloss 5."));
  const auto plain = on_terminal("TERM=xterm NO_COLOR=1", "130");
  EXPECT_EQ(count(plain.output, "\r\x1b[Kstep "), 30) << plain.output;
  EXPECT_EQ(count(plain.output, "\x1b[1m"), 0) << plain.output;
  EXPECT_EQ(count(on_terminal("TERM=dumb", "130").output, "\x1b"), 0);
  for (const size_t columns : {size_t{80}, size_t{30}}) {
    const auto narrow = on_terminal("TERM=xterm", std::to_string(columns)).output;
    const std::string begin = "\r\x1b[Kstep ";
    int num_lines = 0;
    for (size_t at = 0; (at = narrow.find(begin, at)) != std::string::npos; ++num_lines) {
      at += 4;
      const auto line = narrow.substr(at, narrow.find('\r', at) - at);
      EXPECT_LT(line.size(), columns) << line;
      EXPECT_EQ(line.find(" left") != std::string::npos, columns == 80) << line;
    }
    EXPECT_EQ(num_lines, 30) << narrow;
  }
}

TEST(Train, RefusesWhatMakesNoSense) {
  const auto data = text_file();
  const auto refused = [&](const std::vector<std::string>& more, const std::string& part) {
    const auto ended = run(tiny(data, more));
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(contains(ended.output, part));
    EXPECT_EQ(count(ended.output, "\n"), 1) << ended.output;
  };
  refused({"--steps", "0"}, "--steps 0: it must be 1 or more");
  refused({"--ranks", "0"}, "--ranks 0: it must be 1 or more");
  refused({"--seed", "-1"}, "--seed -1: it must be 0 or more");
  refused({"--batch", "0"}, "--batch 0: it must be 1 or more");
  refused({"--batch", "6"}, "--batch 6 rows cannot be shared evenly by 4 ranks; ");
  refused({"--batch", "6"}, "use for example --batch 8");
  refused({"--context", "0"}, "--context 0: it must be 1 or more");
  refused({"--context", "100000"}, "too little text for it");
  refused({"--layers", "-1"}, "--layers -1: it must be 1 or more");
  refused({"--heads", "0"}, "--heads 0: it must be 1 or more");
  refused({"--dim", "30"}, "--dim 30 cannot be divided into 4 heads of an even size; use for ");
  refused({"--lr", "0"}, "--lr 0: it must be above 0");
  refused({"--lr", "nan"}, "--lr nan: it must be above 0");
  refused({"--reshard-after-forward", "maybe"}, "it must be auto, true, false or a number");
  refused({"--reshard-after-forward", "3"}, "the 4 ranks that share the parameters");
  refused({"--mesh", "tp=3"}, "--mesh tp=3: --heads 4 cannot be divided by it");
  refused({"--mesh", "sharp=2"}, "there is no axis 'sharp'; did you mean 'shard'?");
  refused({"--mesh", "shard=2", "--ranks", "4"}, "--mesh shard=2 makes 2 ranks, not 4");
  refused({"--mesh", "dp"}, "'dp' is not an axis; write for example --mesh dp=2,shard=2,tp=2");
  refused(
      {"--accumulate", "3"}, "cannot be shared evenly by 4 ranks in 3 parts each; use --batch 12");
  refused({"--kv-heads", "3"}, "--kv-heads 3: it must be a divisor of --heads 4");
  refused({"--model", "tinny"}, "--model tinny: there is no such size; did you mean 'tiny'?");
  refused({"--schedule", "constant", "--min-lr", "0"}, "has no meaning with --schedule constant");
  refused({"--quiet", "--json"}, "--quiet and --json contradict each other");
  refused({"--no-save"}, "--no-save and --run contradict each other");
  refused({"--betas", "1,2"}, "both must be 0 or more and below 1");
  refused({"--config", "/no/such/file"}, "--config: /no/such/file cannot be read");
}

TEST(Train, RefusesWordsThatItCannotRead) {
  const auto refused = [&](const std::vector<std::string>& words, const std::string& part) {
    const auto ended = run(words);
    EXPECT_EQ(ended.exit_code, 2) << ended.output; // CLI11's own codes
    EXPECT_TRUE(contains(ended.output, part));
  };
  refused({"train", "--steps", "many"}, "--steps = many");
  refused({"train", "--param-dtype", "int8"}, "--param-dtype: int8 not in");
  refused({"train", "--stepz", "3"}, "there is no option --stepz; did you mean --steps?");
  refused({"train", "--acumulate", "3"}, "did you mean --accumulate?");
  refused({"generate", "--promt", "x"}, "did you mean --prompt?");
}

TEST(Train, RefusesWhatDoesNotFitIntoMemory) {
  const auto ended = run({"train", "--model", "70b", "--ranks", "64", "--batch", "64"});
  EXPECT_EQ(ended.exit_code, 2) << ended.output;
  EXPECT_TRUE(contains(ended.output, "fsdp: the run is too large: 64 ranks need about "));
  EXPECT_TRUE(contains(ended.output, "; --force begins it all the same\n")) << ended.output;
}

TEST(Train, RefusesDataThatIsNotThere) {
  const auto ended = run({"train", "--data", "/no/such/text"});
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(contains(ended.output, "--data: there is no file or folder /no/such/text\n"));
}

} // namespace
} // namespace fsdp::test
