// Files of tokens, and the rows that are made of them.
#include <fsdp/error.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
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
std::string megatron_index(int code, int64_t first, int64_t second, int64_t begin = 0) {
  const auto width = code == 1 ? 1 : code == 4 ? 4 : code == 5 ? 8 : 2;
  return std::string("MMIDIDX\x00\x00", 9) + raw<int64_t>({1}) + static_cast<char>(code) +
         raw<int64_t>({2, 3}) + raw<int32_t>({first, second}) +
         raw<int64_t>({begin, first * width}) + raw<int64_t>({0, 1, 2});
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
  refused(
      written("odd.bin", "abc"), "has 3 bytes, which is not a whole number of tokens of 2 bytes");
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
  refused(bad, "has token 59999 at position 2, and the model has 300 tokens (--vocab)", 300);
  refused(
      written("minus.npy", npy("<i4", "(2,)", raw<int32_t>({1, -5}))),
      "has token -5 at position 1");
  const auto path = written("m.bin", raw<uint16_t>(tokens));
  const auto index = path.substr(0, path.size() - 4) + ".idx";
  std::ofstream(index) << megatron_index(8, 2000, 3001);
  refused(path, "is damaged: its index has 5001 tokens");
  std::ofstream(index) << megatron_index(8, 6000, -1000);
  EXPECT_TRUE(contains(
      message_of<ConfigError>([&] { open_token_files({path}, TokenType::uint16, 60000); }),
      "sequence 1 has the length -1000"));
  std::ofstream(index) << megatron_index(8, 2000, 3000, /*begin=*/6000);
  EXPECT_TRUE(contains(
      message_of<ConfigError>([&] { open_token_files({path}, TokenType::uint16, 60000); }),
      "sequence 0 is at byte 6000, not where the one before it ends"));
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

TEST(TokenFiles, WideTokensAreNotReadAsNarrowOnes) {
  const auto tokens = many_tokens(5000, 60000);
  const auto path = written("wide.bin", raw<uint32_t>(tokens));
  const auto message =
      message_of<ConfigError>([&] { open_token_files({path}, raw_type("auto"), 60000); });
  EXPECT_TRUE(contains(message, path + " looks like uint32")) << message;
  EXPECT_TRUE(contains(message, "give --token-dtype uint32 or uint16")) << message;
  EXPECT_EQ(all_of(*open_token_files({path}, raw_type("uint32"), 60000)), tokens);
  EXPECT_EQ(all_of(*open_token_files({path}, raw_type("auto"), 70000)), tokens);
  EXPECT_EQ(open_token_files({path}, raw_type("uint16"), 60000)->size(), 10000);
  const auto narrow = written("narrow.bin", raw<uint16_t>(tokens));
  EXPECT_EQ(all_of(*open_token_files({narrow}, raw_type("auto"), 60000)), tokens);
  const auto few = written("few.bin", raw<uint16_t>({5, 0, 7, 0}));
  EXPECT_EQ(open_token_files({few}, raw_type("auto"), 60000)->size(), 4);
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

// ------------------------------------------------------------ Weights

/// Writes a file of tokens, all from [first, first + count).
void write_numbers(const std::string& path, int64_t first, int64_t count) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(first + i);
  }
  std::ofstream(path, std::ios::binary) << raw<uint16_t>(tokens);
}

TEST(WeightedData, EachDataSetHasItsShareOfTheRows) {
  const auto folder = test::temporary_folder() + "/[1] *"; // a pattern, if it were one
  std::filesystem::create_directory(folder);
  write_numbers(folder + "/a_1.bin", 0, 2000);
  write_numbers(folder + "/a_2.bin", 2000, 2000);
  write_numbers(folder + "/b.bin", 10000, 400); // has many epochs
  std::ofstream(folder + "/mix.json") << R"({"a_*.bin": 6.99, "b.bin": 3, "./b.bin": 0.01})";
  const auto corpus = Corpus::read(folder + "/mix.json", {.vocab = 20000});
  EXPECT_FALSE(Corpus::is_text(folder + "/mix.json"));
  EXPECT_EQ(corpus.num_files(), 4);
  EXPECT_EQ(corpus.num_train() + corpus.num_held_out(), 4000 + 400 + 400);
  EXPECT_TRUE(contains(corpus.shares(), "69.9 % ")) << corpus.shares();
  const int64_t context = 7;
  const auto rows = corpus.train_rows({5, 0, 10000, context}, 0, 10000);
  const auto of_b = rows.select(1, 0).ge(10000);
  EXPECT_EQ(of_b.sum().item<int64_t>(), 3010);
  for (int64_t start = 0; start < 10000; start += 1000) { // they are spread over the turn
    EXPECT_NEAR(of_b.narrow(0, start, 1000).sum().item<int64_t>(), 301, 60);
  }
  // Each epoch of a data set has all its rows, in the order that it has alone.
  const auto starts_of_a = rows.select(1, 0).masked_select(of_b.logical_not());
  std::ofstream(folder + "/alone.json") << R"({"a_*.bin": 1})";
  const auto alone = Corpus::read(folder + "/alone.json", {.vocab = 20000});
  const auto rows_per_epoch = (3800 - 1) / context;
  EXPECT_TRUE(
      starts_of_a.narrow(0, 0, 3 * rows_per_epoch)
          .equal(alone.train_rows({5, 0, 3 * rows_per_epoch, context}, 0, 3 * rows_per_epoch)
                     .select(1, 0)));
  // The next turn goes on where this one has ended.
  const auto later = corpus.train_rows({5, 1, 10000, context}, 0, 10000).select(1, 0);
  EXPECT_TRUE(later.masked_select(later.lt(10000))
                  .narrow(0, 0, 100)
                  .equal(alone.train_rows({5, 0, 7090, context}, 6990, 100).select(1, 0)));
  // Rows depend on their number alone, also after the first turn.
  EXPECT_TRUE(corpus.train_rows({5, 2000, 8, context}, 4, 2)
                  .equal(corpus.train_rows({5, 1000, 16, context}, 4, 2)));
  EXPECT_FALSE(rows.narrow(0, 0, 50).equal(corpus.train_rows({6, 0, 50, context}, 0, 50)));

  const auto held_out = corpus.held_out_rows(0, 100, 100, context);
  EXPECT_NEAR(held_out.select(1, 0).ge(10000).sum().item<int64_t>(), 30, 1);
  EXPECT_FALSE(torch::isin(held_out, rows).any().item<bool>());
  // Evaluation goes through all tokens but the first of each data set, once.
  const auto all = corpus.rows_of_all(0, corpus.num_rows(context) + 3, context);
  const auto targets = all.narrow(1, 1, context);
  EXPECT_EQ(targets.bitwise_and(kIsGiven).eq(0).sum().item<int64_t>(), 4799 - 2);

  // Another weight or other tokens are another corpus, and one data set alone is what it was.
  const auto fingerprint_of = [&](const std::string& name) {
    return Corpus::read(folder + name, {.vocab = 20000}).fingerprint();
  };
  const auto fingerprint = fingerprint_of("/mix.json");
  write_numbers(folder + "/a_2.bin", 2001, 2000);
  EXPECT_NE(fingerprint_of("/mix.json"), fingerprint);
  write_numbers(folder + "/a_2.bin", 2000, 2000);
  EXPECT_EQ(fingerprint_of("/mix.json"), fingerprint);
  std::ofstream(folder + "/other.json") << R"({"a_*.bin": 7, "b.bin": 3, "./b.bin": 0.01})";
  EXPECT_NE(fingerprint_of("/other.json"), fingerprint);
  std::ofstream(folder + "/one.json") << R"({"b.bin": 0.2})";
  const auto one = Corpus::read(folder + "/one.json", {.vocab = 20000});
  const auto same = Corpus::read(folder + "/b.bin", {.vocab = 20000});
  EXPECT_EQ(one.fingerprint(), same.fingerprint());
  EXPECT_TRUE(one.train_rows({1, 9, 8, 3}, 0, 8).equal(same.train_rows({1, 9, 8, 3}, 0, 8)));
}

TEST(WeightedData, BadFilesAreRefused) {
  const auto folder = test::temporary_folder();
  write_numbers(folder + "/a.bin", 0, 2000);
  std::ofstream(folder + "/a.txt") << std::string(2000, 'a');
  const auto refused = [&](const std::string& json, const std::string& part) {
    std::ofstream(folder + "/mix.json") << json;
    const auto message = message_of<ConfigError>(
        [&] { Corpus::read(folder + "/mix.json", {.vocab = 20000}).check_context(16); });
    EXPECT_TRUE(contains(message, part)) << message;
  };
  refused(R"({"a.bin": 0})", "the weight of \"a.bin\" is 0; it must be a number above 0");
  refused(R"({"a.bin": 1, "b.bin": -1})", "the weight of \"b.bin\" is -1");
  refused(R"({"a.bin": 1, "b.bin": "2"})", "the weight of \"b.bin\" is \"2\"");
  refused(R"({"a.bin": 1, "b.bin": 1})", "there is no file or folder " + folder + "/b.bin");
  refused(R"({"a.bin": 1, })", "it is not JSON");
  refused("{}", "names no data set");
  refused(R"({"a.bin": "1"})", "the weight of \"a.bin\" is \"1\"");
  refused(R"({"a.bin": {"b": 1}})", "the weight of \"a.bin\" is {");
  refused(R"({"mix.json": 1})", "weights of weights are not supported");
  refused(R"({"a.bin": 1e308, "./a.bin": 1e308})", "the sum of the weights is not finite");
  refused(R"({"a.bin": 1, "./a.bin": 1e-6})", "has less than one row in 10000");
  refused(R"({"a.bin": 1, "a.txt": 1})", "which has tokens, with " + folder + "/a.txt, which has");
  std::ofstream(folder + "/b.bin") << "a!b!";
  refused(R"({"a.bin": 1, "b.bin": 1})", folder + "/b.bin is too short");
}

TEST(WeightedData, ARunGoesOnAtTheExactRow) {
  const auto folder = test::temporary_folder();
  write_numbers(folder + "/a.bin", 0, 3000);
  write_numbers(folder + "/b.bin", 4000, 900);
  std::ofstream(folder + "/mix.json") << R"({"a.bin": 1, "b.bin": 2})";
  const auto train = [&](std::vector<std::string> more) {
    more.insert(more.begin(), "train");
    const auto ended = test::run(more);
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    return ended.output;
  };
  std::vector<std::string> words{"--data",    folder + "/mix.json",
                                 "--vocab",   "5000",
                                 "--dim",     "32",
                                 "--layers",  "1",
                                 "--batch",   "8",
                                 "--context", "16",
                                 "--steps",   "6",
                                 "--ranks"};
  auto whole = words;
  whole.insert(whole.end(), {"2", "--no-save"});
  auto saved = words;
  saved.insert(saved.end(), {"2", "--run", folder + "/run", "--save-every", "3"});
  const auto losses = test::losses_in(train(whole));
  EXPECT_TRUE(contains(train(saved), "66.7 % " + folder + "/b.bin"));
  const auto again = test::losses_in(
      train({"--resume", folder + "/run/checkpoints/step_00000003", "--ranks", "4", "--no-save"}));
  ASSERT_EQ(losses.size(), 6u);
  ASSERT_EQ(again.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(again[i], losses[i + 3], 1e-4);
  }
  std::ofstream(folder + "/mix.json") << R"({"a.bin": 1, "b.bin": 3})";
  const auto changed = test::run({"train", "--resume", folder + "/run", "--steps", "8"});
  EXPECT_EQ(changed.exit_code, 2) << changed.output;
  EXPECT_TRUE(contains(changed.output, "it has changed since")) << changed.output;
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

TEST(TokenFiles, AVocabularyMayBeSmallerThanBytes) {
  const auto data = written("t.bin", raw<uint16_t>(many_tokens(4000, 20)));
  const auto ended = test::run(
      {"train", "--data", data, "--vocab", "20", "--dim", "32", "--layers", "1", "--context", "8",
       "--batch", "4", "--steps", "1", "--no-save", "--device", "cpu"});
  EXPECT_EQ(ended.exit_code, 0) << ended.output;
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
  refused({"--vocab", "200"}, "--vocab 200: each of the 256 bytes of a text is a token");
  refused({"--data", written("s.bin", raw<uint16_t>(many_tokens(100, 200)))}, "too little text");
}

} // namespace
} // namespace fsdp::cli
