// Checkpoints of any bytes: read or refused, by CheckpointError and without much memory.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <random>

#include "fuzz/checkpoint_inputs.h"
#include "support/processes.h"

namespace fsdp::test {
namespace {

/// This process cannot have much more memory while it lives.
class MemoryLimit {
 public:
  MemoryLimit() {
    constexpr rlim_t kMore = rlim_t{512} << 20;
    rlim_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    EXPECT_GT(pages, 0u);
    EXPECT_EQ(getrlimit(RLIMIT_AS, &before_), 0);
    const auto most = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + kMore;
    const rlimit limit{std::min(most, before_.rlim_max), before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  }
  ~MemoryLimit() {
    setrlimit(RLIMIT_AS, &before_);
  }
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

 private:
  rlimit before_{};
};

bool is_read(const FuzzReader& reader, const FuzzInput& input, const std::string& bytes) {
  try {
    return reader.read(input.kind, bytes);
  } catch (const std::exception& error) {
    ADD_FAILURE() << input.what << ": " << error.what() << "\n"
                  << testing::PrintToString(bytes.substr(0, 1000));
    return false;
  }
}

TEST(FuzzedCheckpoint, TheCorpusIsReadOrRefused) {
  const FuzzReader reader(temporary_folder());
  const MemoryLimit limit;
  for (const auto& input : fuzz_corpus()) {
    EXPECT_EQ(is_read(reader, input, input.bytes), input.good)
        << input.what << " (kind " << static_cast<int>(input.kind) << ")";
  }
}

/// Changes, drops, doubles and swaps bytes.
std::string mutated(std::string text, std::mt19937& random) {
  const auto place = [&] { return text.empty() ? 0 : random() % text.size(); };
  for (auto count = 1 + random() % 4; count-- > 0 && !text.empty();) {
    switch (random() % 5) {
      case 0:
        text[place()] = static_cast<char>(random());
        break;
      case 1:
        text[place()] = "0123456789-{}[],:\"e."[random() % 20];
        break;
      case 2:
        text.erase(place(), 1 + random() % 8);
        break;
      case 3:
        text.insert(place(), text.substr(place(), random() % 40));
        break;
      default:
        text.resize(place());
    }
  }
  return text;
}

TEST(FuzzedCheckpoint, SoAreItsMutations) {
  const FuzzReader reader(temporary_folder());
  const MemoryLimit limit;
  std::mt19937 random(7);
  int num_read = 0;
  int num_refused = 0;
  for (const auto& input : fuzz_corpus()) {
    for (int i = 0; i < (input.good ? 300 : 10); ++i) {
      ++(is_read(reader, input, mutated(input.bytes, random)) ? num_read : num_refused);
    }
  }
  EXPECT_GT(num_read, 0);
  EXPECT_GT(num_refused, 1000);
}

} // namespace
} // namespace fsdp::test
