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
        BadHeader{"'shape' is missing", safetensors_file(R"({"a":{"dtype":"F32"}})", 0)},
        BadHeader{"not a string", safetensors_file(R"({"__metadata__":{"a":1}})", 0)}));

} // namespace
} // namespace fsdp::detail
