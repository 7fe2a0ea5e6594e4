// What `fsdp generate` chooses and prints.
#include <gtest/gtest.h>

#include <map>

#include "cli/generate/text_stream.h"
#include "cli/train/token_choice.h"

namespace fsdp::cli {
namespace {

using Strings = std::vector<std::string>;

/// What a stream passes on, piece by piece. The last piece is what `finish` passes on, or "stop".
Strings passed_on(const Strings& stops, const Strings& pieces) {
  Strings result;
  TextStream stream(stops, [&](const std::string& text) { result.push_back(text); });
  for (const auto& piece : pieces) {
    if (!stream.add(piece)) {
      result.emplace_back("stop");
      return result;
    }
  }
  stream.finish();
  return result;
}

TEST(TextStream, WaitsForTheEndOfACharacter) {
  EXPECT_EQ(passed_on({}, {"a", "\xc3", "\xa4", "b"}), (Strings{"a", "\u00e4", "b"}));
  EXPECT_EQ(passed_on({}, {"x\xf0\x9f", "\x98", "\x80"}), (Strings{"x", "\xf0\x9f\x98\x80"}));
  // Bytes that begin no character pass at once. What is cut off passes at the end.
  EXPECT_EQ(passed_on({}, {"\xff", "\x80", "\xe2\x82"}), (Strings{"\xff", "\x80", "\xe2\x82"}));
  EXPECT_EQ(
      passed_on({}, {"\xe2", "a"}), (Strings{"\xe2"
                                             "a"}));
}

TEST(TextStream, StopsBeforeAText) {
  EXPECT_EQ(passed_on({"</s>"}, {"a</", "s>b"}), (Strings{"a", "stop"}));
  EXPECT_EQ(passed_on({"</s>"}, {"a</", "t>b"}), (Strings{"a", "</t>b"}));
  EXPECT_EQ(passed_on({"</s>"}, {"a</"}), (Strings{"a", "</"}));
  EXPECT_EQ(passed_on({"\n\n", "bc"}, {"abcd\n\n"}), (Strings{"a", "stop"}));
  EXPECT_EQ(passed_on({"aab"}, {"a", "a", "a", "b"}), (Strings{"a", "stop"}));
}

TEST(TextStream, ShowsNothingThatControlsATerminal) {
  EXPECT_EQ(shown_text("a\tb\n\u00e4\u4e00"), "a\tb\n\u00e4\u4e00");
  EXPECT_EQ(shown_text("\x1b[2J\x7f\r"), "?[2J??");
  EXPECT_EQ(shown_text("\u0085\u009b\u00a0"), "??\u00a0");
  EXPECT_EQ(shown_text("\xff\x80z\xe2\x82"), "??z??");
}

/// How often each token is chosen.
std::map<int64_t, int> counts(const TokenChoice::Options& options) {
  TokenChoice choose(options);
  const auto scores = torch::tensor({0.1, 0.5, 0.15, 0.25}).log().to(torch::kFloat);
  std::map<int64_t, int> result;
  for (int i = 0; i < 4000; ++i) {
    ++result[choose(scores)];
  }
  return result;
}

TEST(TokenChoice, DrawsByProbability) {
  const auto all = counts({.temperature = 1});
  EXPECT_NEAR(all.at(1), 2000, 150);
  EXPECT_NEAR(all.at(0), 400, 100);
  EXPECT_EQ(all, counts({.temperature = 1}));
  EXPECT_NE(all, counts({.temperature = 1, .seed = 2}));
  EXPECT_EQ(counts({.temperature = 0}), (std::map<int64_t, int>{{1, 4000}}));
}

TEST(TokenChoice, TopPLeavesTheLikeliest) {
  EXPECT_EQ(counts({.temperature = 1, .top_p = 1e-9}), (std::map<int64_t, int>{{1, 4000}}));
  EXPECT_EQ(counts({.temperature = 1, .top_p = 0.5}), (std::map<int64_t, int>{{1, 4000}}));
  const auto two = counts({.temperature = 1, .top_p = 0.6});
  ASSERT_EQ(two.size(), 2u);
  EXPECT_NEAR(two.at(1), 4000 * 2 / 3, 150); // 0.5 of 0.75
  EXPECT_NEAR(two.at(3), 4000 / 3, 150);
}

TEST(TokenChoice, ALargeVocabularyIsSortedOnlyIfItMustBe) {
  const auto random = at::detail::createCPUGenerator(5);
  for (const double sharpness : {0.1, 1.0, 5.0}) { // with 5, a few tokens have nearly all
    const auto scores = torch::randn({5000}, random) * sharpness;
    const auto probabilities = scores.softmax(-1);
    for (const double top_p : {0.3, 0.9, 0.999}) {
      SCOPED_TRACE("sharpness " + std::to_string(sharpness) + ", top_p " + std::to_string(top_p));
      const auto [sorted, order] = probabilities.sort(-1, /*descending=*/true);
      const auto kept = sorted.masked_fill((sorted.cumsum(-1) - sorted).ge(top_p), 0);
      const auto left = torch::zeros({5000}).scatter(-1, order, kept);
      TokenChoice choose({.temperature = 1, .top_p = top_p, .seed = 3});
      const auto generator = at::detail::createCPUGenerator(3);
      for (int i = 0; i < 20; ++i) {
        const auto expected = torch::multinomial(left, 1, /*replacement=*/true, generator);
        EXPECT_EQ(choose(scores), expected.item<int64_t>());
      }
    }
  }
}

} // namespace
} // namespace fsdp::cli
