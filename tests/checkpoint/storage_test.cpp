#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <random>

#include "base/check.h"
#include "checkpoint/checkpoints.h"
#include "checkpoint/crc32c.h"
#include "checkpoint/safetensors.h"
#include "fuzz/checkpoint_inputs.h"
#include "layout/box.h"

namespace fsdp::detail {
namespace {

using test::contains;
using test::message_of;
using test::safetensors_file;

std::string random_bytes(size_t size) {
  std::mt19937_64 random(size);
  std::string bytes(size, '\0');
  for (auto& byte : bytes) {
    byte = static_cast<char>(random());
  }
  return bytes;
}

TEST(Crc32c, KnownValues) {
  const std::string digits = "123456789";
  const std::string zeros(32, '\0');
  for (const auto& crc : {crc32c, crc32c_by_tables}) {
    SCOPED_TRACE(crc == crc32c_by_tables ? "crc32c_by_tables" : "crc32c");
    EXPECT_EQ(crc("", 0, 0), 0u);
    EXPECT_EQ(crc(digits.data(), digits.size(), 0), 0xe3069283u);
    EXPECT_EQ(crc(zeros.data(), zeros.size(), 0), 0x8a9136aau);
  }
}

TEST(Crc32c, PartsAndBothWaysAgree) {
  const auto bytes = random_bytes(100'000);
  for (const size_t length : {0, 1, 7, 8, 23, 4096, 24576, 24577, 49152, 99000}) {
    SCOPED_TRACE_OF(length);
    const auto whole = crc32c(bytes.data() + 1, length);
    EXPECT_EQ(whole, crc32c_by_tables(bytes.data() + 1, length));
    const auto first = crc32c(bytes.data() + 1, length / 3);
    EXPECT_EQ(whole, crc32c(bytes.data() + 1 + length / 3, length - length / 3, first));
  }
}

constexpr size_t kBuffer = 4 << 20; // of FileWriter

/// In pieces that fill its buffer in all kinds of ways.
void write_pieces(const Path& path, const std::string& bytes, bool direct) {
  FileWriter file(path, direct);
  std::mt19937 random(3);
  for (size_t done = 0; done < bytes.size();) {
    const auto size = std::min<size_t>(random() % (3 * kBuffer / 2), bytes.size() - done);
    file.append(bytes.data() + done, static_cast<int64_t>(size));
    done += size;
  }
  file.finish();
}

TEST(FileWriter, WritesWhatItIsGiven) {
  const auto path = test::temporary_folder() + "/file";
  for (const size_t size : {size_t{0}, size_t{1}, kBuffer - 1, kBuffer, kBuffer + 1, 3 * kBuffer}) {
    const auto bytes = random_bytes(size);
    for (const bool direct : {false, true}) {
      unlink(path.c_str());
      write_pieces(path, bytes, direct);
      EXPECT_TRUE(test::file_text(path) == bytes) << size << (direct ? ", direct" : "");
    }
  }
}

TEST(FileWriter, GoesThroughTheCacheWhereItMust) {
  const auto path = test::temporary_folder() + "/file";
  if (!File::create(path).set_direct(true)) {
    GTEST_SKIP() << "this file system has no other way";
  }
  const auto bytes = random_bytes(3 * kBuffer + 5);
  int num_writes = 0;
  const test::ChangeHook hook([&](const char* operation, const Path&) {
    if (std::string(operation) == "write" && num_writes++ == 0) {
      FSDP_THROW(CheckpointError, "not like this");
    }
  });
  write_pieces(path, bytes, /*direct=*/true);
  EXPECT_TRUE(test::file_text(path) == bytes);
  EXPECT_GT(num_writes, 4);
}

/// Where only a part of a buffer, and of a page, has room.
TEST(FileWriter, SaysThatThereIsNoRoom) {
  const auto path = test::temporary_folder() + "/file";
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{kBuffer + kBuffer / 2 + 100, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto message = message_of<CheckpointError>(
      [&] { write_pieces(path, random_bytes(3 * kBuffer), /*direct=*/true); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(contains(message, path + " cannot be written: File too large"));
}

TEST(Box, Intersection) {
  const Box a{{0, 2}, {4, 4}};
  EXPECT_EQ(intersection(a, {{3, 0}, {5, 3}}), (Box{{3, 2}, {1, 1}}));
  EXPECT_EQ(intersection(a, {{4, 0}, {5, 9}}), std::nullopt);
  EXPECT_EQ(intersection(Box{}, Box{}), Box{}); // scalars
}

TEST(Box, TilesAreExact) {
  EXPECT_TRUE(tile({{{0, 0}, {2, 3}}, {{0, 3}, {2, 1}}}, {2, 4}));
  EXPECT_TRUE(tile({{{}, {}}}, {}));
  EXPECT_TRUE(tile({}, {0, 4}));
  EXPECT_FALSE(tile({}, {}));
  EXPECT_FALSE(tile({{{0, 0}, {2, 3}}}, {2, 4})) << "a part is missing";
  EXPECT_FALSE(tile({{{0, 0}, {2, 2}}, {{0, 1}, {2, 2}}}, {2, 4})) << "overlap";
  EXPECT_FALSE(tile({{{1, 0}, {2, 4}}}, {2, 4})) << "outside";
  EXPECT_FALSE(tile({{{}, {}}, {{}, {}}}, {})) << "twice";
  EXPECT_FALSE(tile({{{0}, {4}}}, {2, 2})) << "another number of dims";
}

TEST(Box, TilesAreFoundAsByCountingElements) {
  std::mt19937 random(3);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint32_t>(n));
  };
  int good = 0;
  for (int round = 0; round < 3000; ++round) {
    const std::vector<int64_t> sizes{2 + below(3), 2 + below(3), 2 + below(3)};
    std::vector<Box> boxes{Box::whole(sizes)};
    for (int i = 0; i < 3; ++i) { // cut a box in two
      auto& first = boxes[static_cast<size_t>(below(static_cast<int64_t>(boxes.size())))];
      const auto dim = static_cast<size_t>(below(3));
      auto second = first;
      const auto at = below(first.sizes[dim] + 1);
      first.sizes[dim] = at;
      second.offsets[dim] += at;
      second.sizes[dim] -= at;
      boxes.push_back(second);
    }
    if (round % 2 == 1) { // and move one
      auto& box = boxes[static_cast<size_t>(below(4))];
      const auto dim = static_cast<size_t>(below(3));
      box.offsets[dim] = below(sizes[dim] - box.sizes[dim] + 1);
    }
    auto counts = torch::zeros(sizes, torch::kLong);
    for (const auto& box : boxes) {
      auto part = counts;
      for (size_t dim = 0; dim < 3; ++dim) {
        part = part.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
      }
      part += 1;
    }
    const bool expected = counts.eq(1).all().item<bool>();
    EXPECT_EQ(tile(boxes, sizes), expected);
    good += expected;
  }
  EXPECT_GT(good, 1500);
  EXPECT_LT(good, 2900);
}

TEST(Box, StridedShardsHaveSeveral) {
  // Chunks 0..5 and 6..11 are each divided over two ranks.
  const auto boxes = local_boxes({12, 2}, {StridedShard{0, 2}}, {2}, {1});
  EXPECT_EQ(boxes, (std::vector<LocalBox>{{{{3, 0}, {3, 2}}, {0, 0}}, {{{9, 0}, {3, 2}}, {3, 0}}}));
  // Where a later axis accounts for it, there is one.
  EXPECT_EQ(local_boxes({12}, {StridedShard{0, 2}, Shard{0}}, {2, 2}, {1, 0}).size(), 1u);
  EXPECT_TRUE(local_boxes({1}, {Shard{0}}, {2}, {1}).empty());
}

std::vector<CopyRun> runs_of(const Box& box, const Block& from, const Block& to) {
  std::vector<CopyRun> runs;
  for_each_run(box, from, to, [&](const CopyRun& run) { runs.push_back(run); });
  return runs;
}

TEST(Box, RunsAreAsLongAsCanBe) {
  const Block whole{{0, 0}, {4, 6}};
  EXPECT_EQ(runs_of({{1, 0}, {2, 6}}, whole, {{1, 0}, {2, 6}}), (std::vector<CopyRun>{{6, 0, 12}}));
  EXPECT_EQ(
      runs_of({{1, 2}, {2, 3}}, whole, {{1, 2}, {2, 3}}),
      (std::vector<CopyRun>{{8, 0, 3}, {14, 3, 3}}));
  EXPECT_EQ(runs_of({{}, {}}, {{}, {}}, {{}, {}}), (std::vector<CopyRun>{{0, 0, 1}}));
  EXPECT_TRUE(runs_of({{0, 0}, {0, 6}}, whole, whole).empty());
}

TEST(Box, RunsCopyTheBox) {
  const auto full = torch::arange(4 * 5 * 6).view({4, 5, 6});
  const std::vector<Box> boxes{
      {{1, 2, 3}, {2, 2, 2}}, {{0, 1, 0}, {3, 3, 6}}, {{2, 0, 0}, {1, 5, 6}}};
  for (const auto& box : boxes) {
    SCOPED_TRACE_OF(box.offsets, box.sizes);
    auto copy = torch::zeros(box.sizes, torch::kLong);
    for_each_run(box, {{0, 0, 0}, {4, 5, 6}}, {box.offsets, box.sizes}, [&](const CopyRun& run) {
      copy.view(-1)
          .narrow(0, run.to, run.length)
          .copy_(full.view(-1).narrow(0, run.from, run.length));
    });
    auto expected = full;
    for (int64_t dim = 0; dim < 3; ++dim) {
      expected = expected.narrow(dim, box.offsets[dim], box.sizes[dim]);
    }
    EXPECT_SAME(copy, expected.contiguous());
  }
}

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors(file, static_cast<int64_t>(file.size()), "f.safetensors");
}

TEST(Safetensors, WhatIsWrittenIsRead) {
  SafetensorsHeader header;
  int64_t bytes = 0;
  for (const auto dtype :
       {at::kBool, at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
        at::kShort, at::kChar, at::kByte, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kUInt16,
        at::kUInt32, at::kUInt64, at::kComplexFloat}) {
    header.entries.push_back({c10::str("t.", dtype), dtype, {3, 5}});
    bytes += header.entries.back().bytes();
  }
  header.entries.push_back({"scalar", at::kFloat, {}});
  header.entries.push_back({"empty", at::kFloat, {0, 7}});
  header.metadata = {{"format", "pt"}};
  const auto start = layout_safetensors(header, "f");
  EXPECT_EQ(start.size() % 8, 0u);
  const auto read = parse(start + std::string(static_cast<size_t>(bytes + 4), 'x'));
  EXPECT_EQ(read.metadata, header.metadata);
  ASSERT_EQ(read.entries.size(), header.entries.size());
  for (const auto& entry : read.entries) {
    EXPECT_EQ(entry.offset % static_cast<int64_t>(c10::elementSize(entry.dtype)), 0) << entry.name;
    const auto same = [&](const auto& other) {
      return other.name == entry.name && other.dtype == entry.dtype && other.sizes == entry.sizes &&
             other.offset == entry.offset;
    };
    EXPECT_TRUE(std::any_of(header.entries.begin(), header.entries.end(), same)) << entry.name;
  }
}

struct BadHeader {
  const char* says;
  std::string file;
};
void PrintTo(const BadHeader& header, std::ostream* out) {
  *out << header.says;
}

class BadHeaders : public testing::TestWithParam<BadHeader> {};

TEST_P(BadHeaders, AreRefused) {
  const auto message = message_of<CheckpointError>([] { parse(GetParam().file); });
  EXPECT_TRUE(contains(message, GetParam().says));
  EXPECT_TRUE(contains(message, "f.safetensors"));
}

/// A header's entry of a tensor in fp32.
std::string entry(const std::string& name, const std::string& sizes, const std::string& offsets) {
  return c10::str(
      "\"", name, "\":{\"dtype\":\"F32\",\"shape\":[", sizes, "],\"data_offsets\":[", offsets,
      "]}");
}

/// A file of a header and 8 bytes.
std::string file_of(const std::string& entries) {
  return safetensors_file("{" + entries + "}", 8);
}

std::string header_of_dims(size_t dims) {
  std::string ones;
  for (size_t i = 0; i < dims; ++i) {
    ones += i > 0 ? ",1" : "1";
  }
  return R"({"a":{"dtype":"U8","shape":[)" + ones + R"(],"data_offsets":[0,1]}})";
}

const std::string kGood = "{" + entry("a", "2", "0,8") + "}";

INSTANTIATE_TEST_SUITE_P(
    Safetensors,
    BadHeaders,
    testing::Values(
        BadHeader{"too few", "1234"},
        BadHeader{"truncated", safetensors_file(kGood, 0).substr(0, 20)},
        BadHeader{"not a safetensors", std::string(16, '\xff')},
        BadHeader{"broken", safetensors_file("{\"a\":", 8)},
        BadHeader{"not a JSON object", safetensors_file("[]", 8)},
        BadHeader{"nested too deep", safetensors_file(std::string(1000, '['), 8)},
        BadHeader{"has 65 dims, more than 64", safetensors_file(header_of_dims(65), 1)},
        BadHeader{"truncated", safetensors_file(kGood, 7)},
        BadHeader{"belong to no tensor", safetensors_file(kGood, 9)},
        BadHeader{"twice", file_of(entry("a", "1", "0,4") + "," + entry("a", "1", "4,8"))},
        BadHeader{"overlap", file_of(entry("a", "1", "0,4") + "," + entry("b", "1", "2,6"))},
        BadHeader{"gap", file_of(entry("a", "1", "4,8"))},
        BadHeader{
            "unknown dtype",
            safetensors_file(R"({"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}})", 8)},
        BadHeader{"not a size", file_of(entry("a", "-2", "0,8"))},
        BadHeader{"not a size", file_of(entry("a", "2.5", "0,8"))},
        BadHeader{"be counted", file_of(entry("a", "4294967296,4294967296", "0,8"))},
        BadHeader{"need 12 bytes", file_of(entry("a", "3", "0,8"))},
        BadHeader{"begin and an end", file_of(entry("a", "2", "8,0"))},
        BadHeader{"no 'shape'", safetensors_file(R"({"a":{"dtype":"F32"}})", 0)},
        BadHeader{"not a string", safetensors_file(R"({"__metadata__":{"a":1}})", 0)}));

} // namespace
} // namespace fsdp::detail
