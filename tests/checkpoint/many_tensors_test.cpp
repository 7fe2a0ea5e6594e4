// Files with very many tensors, pieces or problems: twice as many may take twice the work, not four
// times.
#include <gtest/gtest.h>

#include <fsdp/checkpoint_tools.h>

#include <ctime>

#include "checkpoint/checkpoints.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/writer.h"

namespace fsdp::test {
namespace {

using detail::Box;

/// The processor's time of this thread. Other programs do not count.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// How often this process has called read or pread.
int64_t read_calls() {
  std::ifstream file("/proc/self/io");
  std::string word;
  int64_t calls = -1;
  while (file >> word && word != "syscr:") {
  }
  file >> calls;
  return calls;
}

/// Eight times the input takes eight times as long, or 64 times if the time grows with the square.
/// `prepare(n)` returns what is to be measured. The best of some tries counts: a slow moment of the
/// machine shows in some of them only.
template <class Prepare>
void expect_linear(int64_t n, const Prepare& prepare) {
  const auto seconds = [&](int64_t size) {
    const auto work = prepare(size);
    double best = 1e9;
    for (int i = 0; i < 3; ++i) {
      const auto start = cpu_seconds();
      work();
      best = std::min(best, cpu_seconds() - start);
    }
    return best;
  };
  const auto few = seconds(n);
  EXPECT_LT(seconds(8 * n), 24 * few) << n << " take " << few << " s";
}

std::string header_of(int64_t n) {
  detail::SafetensorsHeader header;
  for (int64_t i = 0; i < n; ++i) {
    header.entries.push_back({c10::str("layers.", i, ".weight"), at::kFloat, {1}});
  }
  return detail::layout_safetensors(header, "file");
}

detail::Catalog catalog_of(int64_t n) {
  detail::Catalog catalog;
  for (int64_t i = 0; i < n; ++i) {
    catalog.tensors.push_back(
        {c10::str("layers.", i, ".weight"), at::kFloat, {1}, {{"file", 4 * i, {{0}, {1}}, {7}}}});
    catalog.values.emplace_back(c10::str("value.", i), i);
  }
  return catalog;
}

/// Writes n tensors of one element, by `save` or as a file of another program.
std::string written(int64_t n, bool ours) {
  const auto path = temporary_folder() + "/checkpoint";
  if (ours) {
    StateDict state;
    for (int64_t i = 0; i < n; ++i) {
      state.insert(c10::str("layers.", i, ".weight"), torch::ones({1}));
    }
    save(state, path);
    return path;
  }
  set_file_text(path + ".safetensors", header_of(n) + std::string(static_cast<size_t>(4 * n), 1));
  return path + ".safetensors";
}

TEST(ManyTensors, AHeaderTakesLinearTime) {
  expect_linear(2000, [](int64_t n) {
    return [text = header_of(n), n] {
      const auto bytes = static_cast<int64_t>(text.size()) + 4 * n;
      EXPECT_EQ(detail::parse_safetensors(text, bytes, "file").entries.size(), n);
    };
  });
}

TEST(ManyTensors, AManifestTakesLinearTime) {
  expect_linear(2000, [](int64_t n) {
    return [text = detail::manifest_text(catalog_of(n), "file"), n] {
      const auto catalog = detail::parse_manifest(text, "file");
      EXPECT_EQ(catalog.tensors.size(), n);
      EXPECT_EQ(catalog.values.size(), n);
    };
  });
}

/// Half of the tensor in rows and half in columns: no order of the boxes keeps neighbours apart.
TEST(ManyTensors, ManyPiecesOfOneTensorTakeLinearTime) {
  expect_linear(4000, [](int64_t n) {
    std::vector<Box> boxes;
    for (int64_t i = 0; i < n; ++i) {
      boxes.push_back({{i, 0}, {1, n}});
      boxes.push_back({{n, i}, {n, 1}});
    }
    return [boxes, n] {
      EXPECT_TRUE(detail::tile(boxes, {2 * n, n}));
      auto twice = boxes;
      twice[0] = twice[2];
      EXPECT_FALSE(detail::tile(twice, {2 * n, n})) << "the sum of the sizes is right";
    };
  });
}

class CheckpointFormats : public testing::TestWithParam<bool> {};

TEST_P(CheckpointFormats, EachTensorIsReadOnce) {
  if (read_calls() < 0) {
    GTEST_SKIP() << "this system does not count";
  }
  constexpr int64_t kFew = 500;
  std::vector<int64_t> calls;
  for (const auto n : {kFew, 2 * kFew}) {
    const auto path = written(n, GetParam());
    const auto before = read_calls();
    const auto report = verify_checkpoint(path);
    calls.push_back(read_calls() - before);
    EXPECT_EQ(report.num_tensors, n);
    EXPECT_TRUE(report.problems.empty());
  }
  EXPECT_LE(calls[1] - calls[0], kFew + 10) << "one for each further tensor";
}

TEST_P(CheckpointFormats, AllToolsTakeLinearTime) {
  expect_linear(1000, [](int64_t n) {
    return [path = written(n, GetParam()), n] {
      EXPECT_EQ(verify_checkpoint(path).num_tensors, n);
      EXPECT_EQ(inspect_checkpoint(path).tensors.size(), n);
      for (const auto format : {ConvertOptions::Format::full, ConvertOptions::Format::sharded}) {
        const auto out = path + "_out";
        const auto report =
            convert_checkpoint(path, out, {.format = format, .num_ranks = 2, .overwrite = true});
        EXPECT_EQ(report.num_tensors, n);
      }
      StateDict state;
      for (int64_t i = 0; i < n; ++i) {
        state.insert(c10::str("layers.", i, ".weight"), torch::zeros({1}));
      }
      load(state, path);
    };
  });
}

INSTANTIATE_TEST_SUITE_P(ManyTensors, CheckpointFormats, testing::Bool(), [](const auto& param) {
  return std::string(param.param ? "Ours" : "Theirs");
});

TEST(ManyTensors, ManyProblemsTakeLinearTime) {
  expect_linear(500, [](int64_t n) {
    const auto path = written(n, /*ours=*/true);
    auto text = file_text(path + "/rank_00000.safetensors");
    for (size_t i = text.size() - static_cast<size_t>(4 * n); i < text.size(); ++i) {
      text[i] ^= 1; // every tensor is damaged
    }
    set_file_text(path + "/rank_00000.safetensors", text);
    return [path, n] { EXPECT_EQ(verify_checkpoint(path).problems.size(), n); };
  });
}

} // namespace
} // namespace fsdp::test
