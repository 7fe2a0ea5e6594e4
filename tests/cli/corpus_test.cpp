// The text of `fsdp train`.
#include "cli/train/corpus.h"

#include <sys/stat.h>

#include <fsdp/error.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "cli/check.h"
#include "cli/tiny_config.h"
#include "support/processes.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;
using test::message_of;

TEST(Corpus, EveryNumberOfRanksSeesTheSameBatches) {
  const Corpus corpus(sample_text());
  const auto whole = corpus.train_rows({7, 3, 8, 16}, 0, 8);
  EXPECT_EQ(whole.sizes(), (std::vector<int64_t>{8, 17}));
  for (const int64_t ranks : {2, 4, 8}) {
    SCOPED_TRACE_OF(ranks);
    std::vector<torch::Tensor> parts;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      parts.push_back(corpus.train_rows({7, 3, 8, 16}, rank * 8 / ranks, 8 / ranks));
    }
    EXPECT_SAME(torch::cat(parts), whole);
  }
  EXPECT_FALSE(corpus.train_rows({7, 4, 8, 16}, 0, 8).equal(whole));
  EXPECT_FALSE(corpus.train_rows({8, 3, 8, 16}, 0, 8).equal(whole));
}

TEST(Corpus, HoldsOutATwentiethFromAllOverTheText) {
  std::string text;
  for (int i = 0; i < 40; ++i) { // of the longest block's size each
    text += std::string(64 << 10, static_cast<char>('A' + i));
  }
  const Corpus corpus(text);
  EXPECT_EQ(corpus.num_train(), 38 * (64 << 10));
  EXPECT_EQ(corpus.num_held_out(), 2 * (64 << 10));
  const auto rows = corpus.held_out_rows(0, 4, 4, 8);
  EXPECT_TRUE(rows.slice(0, 0, 2).eq('A' + 19).all().item<bool>());
  EXPECT_TRUE(rows.slice(0, 2, 4).eq('A' + 39).all().item<bool>());
}

TEST(Corpus, KnowsTheLossOfByteFrequencies) {
  std::string text;
  for (int i = 0; i < 40000; ++i) {
    text += i % 2 == 0 ? "a" : "b";
  }
  EXPECT_NEAR(Corpus(text).frequency_loss(), std::log(2), 0.01);
}

TEST(Corpus, ReadsTheTextBelowAFolderInTheOrderOfTheNames) {
  const auto folder = test::temporary_folder();
  mkdir((folder + "/b").c_str(), 0700);
  mkdir((folder + "/.hidden").c_str(), 0700);
  std::ofstream(folder + "/c.txt") << std::string(100, 'c');
  std::ofstream(folder + "/a.txt") << std::string(100, 'a');
  std::ofstream(folder + "/b/inner") << std::string(100, 'b');
  std::ofstream(folder + "/.hidden/x") << "hidden";
  std::ofstream(folder + "/picture") << std::string("\0\1\2", 3);
  const auto corpus = Corpus::read(folder);
  EXPECT_EQ(corpus.num_files(), 3);
  EXPECT_EQ(corpus.num_train(), 285);
  const auto held_out = corpus.held_out_rows(0, 1, 1, 14); // the last block of 15
  EXPECT_TRUE(held_out.eq('c').all().item<bool>());
}

TEST(Corpus, WhatRunsHaveLeftIsNoText) {
  const auto folder = test::temporary_folder();
  for (const auto* name : {"/runs", "/runs/one", "/runs/half"}) {
    mkdir((folder + name).c_str(), 0700);
  }
  std::ofstream(folder + "/a.txt") << std::string(100, 'a');
  std::ofstream(folder + "/runs/one/metrics.jsonl") << "{}";
  std::ofstream(folder + "/runs/one/config.json") << "{}";
  std::ofstream(folder + "/runs/one/report.html") << "<html>";
  std::ofstream(folder + "/runs/half/config.json") << std::string(100, 'c'); // of something else
  const auto corpus = Corpus::read(folder);
  EXPECT_EQ(corpus.num_files(), 2);
  EXPECT_EQ(corpus.num_train() + corpus.num_held_out(), 200);
  EXPECT_EQ(Corpus::read(folder + "/runs/one").num_files(), 3); // who asks for it gets it
}

TEST(Corpus, RefusesWhatHasNoText) {
  const auto folder = test::temporary_folder();
  const auto refusal = [](const std::string& path) {
    return message_of<ConfigError>([&] { Corpus::read(path); });
  };
  EXPECT_TRUE(contains(refusal(folder), "--data: there is no text in "));
  EXPECT_TRUE(contains(refusal(folder + "/none"), "--data: there is no file or folder "));
  EXPECT_TRUE(contains(refusal("/dev/null"), "neither a file nor a folder"));
  const auto too_short = [](const std::string& text) {
    return message_of<ConfigError>([&] { Corpus(text).check_context(16); });
  };
  EXPECT_TRUE(contains(too_short(""), "--data: text is too short: it has 0 bytes"));
  EXPECT_TRUE(contains(too_short("tiny"), "and --context 16 needs about 340"));
  EXPECT_TRUE(
      contains(too_short(std::string(100, 'x')), "give more with --data, or a --context below 5"));
}

TEST(Corpus, FindsLibTorchsHeaders) {
  const auto corpus = Corpus::libtorch_headers();
  EXPECT_GT(corpus.num_files(), 1000);
  EXPECT_GT(corpus.num_train(), 10'000'000);
}

TEST(Corpus, PromptIsPartOfALineOfTheHeldOutText) {
  EXPECT_TRUE(contains(Corpus(sample_text()).prompt(), "for (int i = 0;"));
  EXPECT_EQ(Corpus(std::string(2000, 'x')).prompt(), std::string(16, 'x'));
}

} // namespace
} // namespace fsdp::cli
