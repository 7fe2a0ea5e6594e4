// Files of tokens, and the rows that are made of them.
#include <fsdp/error.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>

#include "cli/check.h"
#include "cli/tiny_run.h"
#include "cli/train/corpus.h"
#include "support/processes.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;
using test::message_of;

/// Writes numbers as they lie in memory.
template <class T>
std::string raw(const std::vector<int64_t>& tokens) {
  std::string bytes;
  for (const auto token : tokens) {
    const auto value = static_cast<T>(token);
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  return bytes;
}

std::vector<int64_t> many_tokens(int64_t count, int64_t vocab) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back((i * 7919 + i / 13) % vocab);
  }
  return tokens;
}

std::string written(const std::string& name, const std::string& bytes) {
  const auto path = test::temporary_folder() + "/" + name;
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

std::string npy(const std::string& dtype, const std::string& shape, const std::string& data) {
  auto header = "{'descr': '" + dtype + "', 'fortran_order': False, 'shape': " + shape + ", }";
  header.resize((header.size() + 11 + 63) / 64 * 64 - 11, ' ');
  header += '\n';
  return std::string("\x93NUMPY\x01\x00", 8) +
         raw<uint16_t>({static_cast<int64_t>(header.size())}) + header + data;
}

std::string llmc(int64_t mark, const std::string& data, int64_t count) {
  std::vector<int64_t> header(256);
  header[0] = mark;
  header[1] = mark == 20240520 ? 1 : 7;
  header[2] = count;
  return raw<int32_t>(header) + data;
}

/// The index of Megatron for two sequences.
std::string megatron_index(int code, int64_t first, int64_t second) {
  return std::string("MMIDIDX\x00\x00", 9) + raw<int64_t>({1}) + static_cast<char>(code) +
         raw<int64_t>({2, 3}) + raw<int32_t>({first, second}) + raw<int64_t>({0, first}) +
         raw<int64_t>({0, 1, 2});
}

std::vector<int64_t> all_of(const TokenSource& source) {
  std::vector<int64_t> tokens(static_cast<size_t>(source.size()));
  source.read(0, source.size(), tokens.data());
  return tokens;
}

TEST(TokenFiles, EveryFormatHasTheSameTokens) {
  const auto tokens = many_tokens(5000, 60000);
  const auto expect = [&](const std::string& path, TokenType kind = TokenType::uint16) {
    EXPECT_EQ(all_of(*open_token_files({path}, kind, 60000)), tokens) << path;
  };
  expect(written("nano.bin", raw<uint16_t>(tokens)));
  expect(written("nano32.bin", raw<uint32_t>(tokens)), TokenType::uint32);
  expect(written("gpt2.bin", llmc(20240520, raw<uint16_t>(tokens), 5000)));
  expect(written("llama3.bin", llmc(20240801, raw<uint32_t>(tokens), 5000)));
  expect(written("a.npy", npy("<u2", "(5000,)", raw<uint16_t>(tokens))));
  expect(written("b.npy", npy("<i4", "(5000,)", raw<int32_t>(tokens))));
  expect(written("c.npy", npy("<i8", "(5000,)", raw<int64_t>(tokens))));
  for (const auto& [code, bytes] :
       {std::pair{8, raw<uint16_t>(tokens)},
        {4, raw<int32_t>(tokens)},
        {5, raw<int64_t>(tokens)}}) {
    const auto path = written("corpus.bin", bytes);
    std::ofstream(path.substr(0, path.size() - 4) + ".idx") << megatron_index(code, 2000, 3000);
    expect(path);
  }
  const auto first = written("1.bin", raw<uint16_t>({tokens.begin(), tokens.begin() + 1234}));
  const auto second = written("2.bin", raw<uint16_t>({tokens.begin() + 1234, tokens.end()}));
  const auto both = open_token_files({first, second}, TokenType::uint16, 60000);
  EXPECT_EQ(all_of(*both), tokens);
  std::vector<int64_t> across(10);
  both->read(1230, 10, across.data());
  EXPECT_EQ(across, std::vector<int64_t>(tokens.begin() + 1230, tokens.begin() + 1240));
}

TEST(TokenFiles, BadFilesAreNamed) {
  const auto tokens = many_tokens(5000, 60000);
  const auto refused = [&](const std::string& path, const std::string& part,
                           int64_t vocab = 60000) {
    const auto message = message_of<ConfigError>(
        [&] { all_of(*open_token_files({path}, TokenType::uint16, vocab)); });
    EXPECT_TRUE(contains(message, part)) << message;
    EXPECT_TRUE(contains(message, path)) << message;
  };
  refused(written("odd.bin", "abc"), "has 3 bytes, which is no whole number of tokens of 2 bytes");
  refused(written("empty.bin", ""), "is empty, or not a file");
  refused(
      written("cut.bin", llmc(20240520, raw<uint16_t>(tokens), 5001)),
      "is damaged: its header has 5001 tokens, and there are 5000");
  refused(
      written("more.bin", llmc(20240520, raw<uint16_t>(tokens), 3000)),
      "its header has 3000 tokens, and there are 5000");
  refused(written("cut.npy", npy("<u2", "(5001,)", raw<uint16_t>(tokens))), "is damaged");
  refused(
      written("wide.npy", npy("<u2", "(50, 100)", raw<uint16_t>(tokens))), "must have one axis");
  refused(written("real.npy", npy("<f4", "(5000,)", raw<uint32_t>(tokens))), "its dtype is not");
  refused(written("text.npy", "a text that is not of NumPy"), "it is not a file of NumPy");
  const auto bad = written("bad.bin", raw<uint16_t>({1, 2, 59999, 3}));
  refused(bad, "has token 59999 at place 2, and the model has 300 tokens (--vocab)", 300);
  refused(
      written("minus.npy", npy("<i4", "(2,)", raw<int32_t>({1, -5}))), "has token -5 at place 1");
  const auto path = written("m.bin", raw<uint16_t>(tokens));
  const auto index = path.substr(0, path.size() - 4) + ".idx";
  std::ofstream(index) << megatron_index(8, 2000, 3001);
  refused(path, "is damaged: its index has 5001 tokens");
  std::ofstream(index) << megatron_index(8, 6000, -1000);
  EXPECT_TRUE(contains(
      message_of<ConfigError>([&] { open_token_files({path}, TokenType::uint16, 60000); }),
      "sequence 1 has the length -1000"));
  std::ofstream(index) << megatron_index(8, 2000, 3000).substr(0, 60);
  EXPECT_TRUE(contains(
      message_of<ConfigError>([&] { open_token_files({path}, TokenType::uint16, 60000); }),
      "is damaged: it has 60 bytes"));
  std::ofstream(index) << megatron_index(6, 2000, 3000);
  EXPECT_TRUE(contains(
      message_of<ConfigError>([&] { open_token_files({path}, TokenType::uint16, 60000); }),
      "says that tokens have type 6"));
  EXPECT_TRUE(
      contains(message_of<ConfigError>([] { Corpus::read("no/such_*.bin"); }), "finds no file"));
}

TEST(Corpus, AnEpochOfTokensHasEachRowOnce) {
  const int64_t context = 7;
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < 3000; ++i) {
    tokens.push_back(i);
  }
  const auto corpus = Corpus::read(written("t.bin", raw<uint16_t>(tokens)), {.vocab = 3000});
  EXPECT_FALSE(corpus.is_bytes());
  const auto rows_per_epoch = (corpus.num_train() - 1) / context;
  std::vector<std::set<int64_t>> starts(2); // of each epoch
  std::vector<int64_t> order;
  for (int64_t number = 0; number < 2 * rows_per_epoch; ++number) {
    const auto batch = BatchOf{.seed = 3, .step = number / 8, .rows = 8, .context = context};
    const auto row = corpus.train_rows(batch, number % 8, 1)[0];
    order.push_back(row[0].item<int64_t>());
    starts[static_cast<size_t>(number / rows_per_epoch)].insert(order.back());
  }
  EXPECT_EQ(static_cast<int64_t>(starts[0].size()), rows_per_epoch);
  EXPECT_EQ(starts[0], starts[1]);
  const auto half = order.begin() + rows_per_epoch;
  EXPECT_FALSE(std::equal(order.begin(), half, half)) << "the second epoch has another order";
  EXPECT_FALSE(std::is_sorted(order.begin(), half));
  // The order depends on the number of the row alone.
  EXPECT_TRUE(corpus.train_rows({3, 2, 8, context}, 1, 1)
                  .equal(corpus.train_rows({3, 1, 17, context}, 0, 1)));
  // What is held out is in no row.
  const auto held_out = corpus.held_out_rows(0, 16, 16, context);
  const auto trained = corpus.train_rows({3, 0, rows_per_epoch, context}, 0, rows_per_epoch);
  EXPECT_FALSE(torch::isin(held_out, trained).any().item<bool>());
}

TEST(Corpus, LossOfTokenFrequencies) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < 40000; ++i) {
    tokens.push_back(i % 4 * 1000);
  }
  const auto corpus = Corpus::read(written("t.bin", raw<uint16_t>(tokens)), {.vocab = 5000});
  EXPECT_NEAR(corpus.frequency_loss(), std::log(4), 0.1);
}

// ------------------------------------------------------------ The tool

TEST(TokenFiles, ARunGoesOnAtTheExactRow) {
  const auto data = written("t.bin", raw<uint16_t>(many_tokens(40000, 300)));
  const auto train = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words{"train", "--data",   data,  "--vocab",   "300", "--dim",
                                   "32",    "--layers", "1",   "--context", "16",  "--batch",
                                   "8",     "--device", "cpu", "--lr",      "1e-2"};
    words.insert(words.end(), more.begin(), more.end());
    const auto ended = test::run(words);
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    EXPECT_TRUE(contains(ended.output, "38.0 k tokens to train on and 2.00 k tokens held out"))
        << ended.output;
    EXPECT_TRUE(contains(ended.output, "(token frequencies alone: 5.6")) << ended.output;
    EXPECT_FALSE(contains(ended.output, "sample ")) << "there is no text";
    return ended.output;
  };
  const auto folder = test::temporary_folder();
  const auto whole = train({"--ranks", "2", "--steps", "6", "--no-save"});
  train({"--ranks", "2", "--steps", "6", "--run", folder + "/a", "--save-every", "3"});
  const auto ended = test::run(
      {"train", "--resume", folder + "/a/checkpoints/step_00000003", "--ranks", "4", "--run",
       folder + "/b"});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
  const auto losses = test::losses_in(whole);
  const auto resumed = test::losses_in(ended.output);
  ASSERT_GE(resumed.size(), 1u) << ended.output;
  EXPECT_NEAR(resumed.back(), losses.back(), 1e-4) << ended.output << whole;
}

TEST(TokenFiles, TheToolRefusesBadFiles) {
  const auto refused = [](const std::vector<std::string>& more, const std::string& part) {
    std::vector<std::string> words{"train", "--no-save", "--device", "cpu"};
    words.insert(words.end(), more.begin(), more.end());
    const auto ended = test::run(words);
    EXPECT_EQ(ended.exit_code, 2) << ended.output;
    EXPECT_TRUE(contains(ended.output, part)) << ended.output;
  };
  const auto data = written("t.bin", raw<uint16_t>(many_tokens(40000, 300)));
  refused({"--data", data}, "and the model has 256 tokens (--vocab)");
  refused({"--data", data, "--token-dtype", "uint32", "--vocab", "300"}, "has token ");
  refused({"--data", test::temporary_folder() + "/*.bin"}, "finds no file");
  refused({"--data", written("s.bin", raw<uint16_t>(many_tokens(100, 200)))}, "too little text");
}

} // namespace
} // namespace fsdp::cli
