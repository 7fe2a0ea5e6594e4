// What is checked before a load changes anything, and how much a load reads and holds.
#include <fsdp/checkpoint.h>
#include <fsdp/checkpoint_tools.h>

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <atomic>

#include "checkpoint/checkpoints.h"

namespace fsdp {
namespace {

using namespace test;

/// Rows on two ranks, as step 1 of a series.
void save_rows(const std::string& root) {
  run_ranks(2, [&](int) {
    auto state = state_with("w", distribute_tensor(torch::ones({6, 2}), world_mesh(), {Shard{0}}));
    CheckpointSeries(root).save(1, state);
  });
}

TEST(LoadChecks, OursWithoutItsManifestIsNotComplete) {
  // As an `rm -r` or a copy leaves it that was stopped on the way.
  const auto root = temporary_folder() + "/run";
  save_rows(root);
  const auto path = root + "/step_00000001";
  ASSERT_EQ(unlink((path + "/manifest.json").c_str()), 0);
  ASSERT_EQ(unlink((path + "/rank_00001.safetensors").c_str()), 0);
  EXPECT_EQ(CheckpointSeries(root).latest(), std::nullopt);
  std::vector<std::string> problems{"there is no checkpoint"};
  try {
    problems = verify_checkpoint(path).problems;
  } catch (const CheckpointError&) {
  }
  EXPECT_FALSE(problems.empty()) << "half of w is gone";
}

TEST(LoadChecks, ANumberedFileThatIsMissingIsNoticedWithoutAnIndex) {
  const auto path = temporary_folder() + "/hf";
  StateDict state;
  for (const auto* key : {"a", "b", "c"}) {
    state.insert(key, torch::ones({8}));
  }
  save_hf(state, path, {.max_file_bytes = 32});
  ASSERT_EQ(unlink((path + "/model.safetensors.index.json").c_str()), 0);
  ASSERT_EQ(unlink((path + "/model-00002-of-00003.safetensors").c_str()), 0);
  EXPECT_FALSE(verify_checkpoint(path).problems.empty());
}

TEST(LoadChecks, NothingIsChangedWhereATensorCannotBeWritten) {
  const auto path = temporary_folder() + "/checkpoint";
  auto saved = state_with("a", torch::ones({4}));
  saved.insert("b", torch::ones({4}));
  save(saved, path);
  run_ranks(2, [&](int rank) {
    auto state = state_with("a", torch::zeros({4}));
    // One number of memory for four.
    state.insert("b", rank == 1 ? torch::zeros({1}).expand({4}) : torch::zeros({4}));
    message_of<CheckpointError>([&] { load(state, path); });
    EXPECT_SAME(std::get<at::Tensor>(state.at("a")), torch::zeros({4}));
  });
}

TEST(LoadChecks, NumbersThatDoNotFitAreRefused) {
  const auto path = temporary_folder() + "/checkpoint";
  auto saved = state_with("w", torch::tensor({0.5F, 3e9F, NAN}));
  saved.insert("c", torch::ones({2}, torch::kComplexFloat));
  save(saved, path);
  for (const auto dtype : {at::kInt, at::kBool}) {
    SCOPED_TRACE_OF(dtype);
    auto state = state_with("w", torch::zeros({3}, dtype));
    message_of<CheckpointError>([&] { load(state, path); });
  }
  auto state = state_with("c", torch::zeros({2}));
  message_of<CheckpointError>([&] { load(state, path); });
}

/// A number from a line "name: number" of a file in /proc/self.
int64_t proc_number(const std::string& file, const std::string& name) {
  std::ifstream lines("/proc/self/" + file);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, name.size() + 1, name + ":") == 0) {
      return std::stoll(line.substr(name.size() + 1));
    }
  }
  ADD_FAILURE() << "no " << name << " in " << file;
  return 0;
}

TEST(LoadChecks, LoadingConvertsWithoutHoldingTheFilesDtype) {
#ifdef FSDP_TEST_TSAN
  GTEST_SKIP() << "the thread sanitizer takes memory of its own";
#endif
  constexpr int64_t kMib = 1 << 20;
  constexpr int kTensors = 8;
  const auto path = temporary_folder() + "/checkpoint";
  const auto make = [](at::ScalarType dtype) {
    StateDict state;
    for (int i = 0; i < kTensors; ++i) {
      state.insert("w" + std::to_string(i), torch::ones({4 * kMib}, dtype));
    }
    return state;
  };
  save(make(at::kDouble), path);
  auto state = make(at::kBFloat16); // 64 MiB
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5"; // the most so far is what there is now
  const auto before = proc_number("status", "VmRSS");
  load(state, path);
  const auto most = (proc_number("status", "VmHWM") - before) / 1024; // MiB
  EXPECT_LE(most, 64 * 1.2 + 33) << "33 MiB: one tensor as it is in the file, and a block";
}

TEST(LoadChecks, ARankReadsOnlyWhatItNeeds) {
  const auto path = temporary_folder() + "/model";
  const auto whole_values = torch::ones({64, 128 * 1024}); // 32 MiB, rows of 512 KiB
  {
    auto state = state_with("w", whole_values);
    save_hf(state, path); // files of others have no checksums
  }
  std::atomic<int64_t> before{0};
  run_ranks(4, [&](int rank) {
    auto state = state_with(
        "w", distribute_tensor(torch::zeros_like(whole_values), world_mesh(), {Shard{1}}));
    default_group().barrier();
    if (rank == 0) {
      before = proc_number("io", "rchar");
    }
    default_group().barrier();
    load(state, path);
  });
  const auto read = proc_number("io", "rchar") - before;
  // Once to check, and once into the tensors.
  EXPECT_LE(read, whole_values.nbytes() * 9 / 4) << "all ranks together";
}

} // namespace
} // namespace fsdp
