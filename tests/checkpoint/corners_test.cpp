// Savers between each other's steps, clocks that go back, folders of others; and values
// that do not fit.
#include <fsdp/checkpoint.h>
#include <fsdp/checkpoint_tools.h>
#include <fsdp/optim.h>

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include "base/check.h"
#include "checkpoint/checkpoints.h"
#include "checkpoint/state_dicts.h"

namespace fsdp {
namespace {

using namespace test;
using namespace std::chrono_literals;

StateDict numbered(int64_t number) {
  auto state = state_with("w", torch::full({4}, number));
  state.insert("number", number);
  return state;
}

int64_t number_in(const std::string& path) {
  auto state = numbered(-1);
  load(state, path);
  EXPECT_SAME(
      std::get<at::Tensor>(state.at("w")), torch::full({4}, std::get<int64_t>(state.at("number"))));
  return std::get<int64_t>(state.at("number"));
}

/// Another saver's work, once, right before the first such operation of ours.
class Between {
 public:
  Between(std::string operation, detail::Path path, std::function<void()> other)
      : hook_([this,
               operation = std::move(operation),
               path = std::move(path),
               other = std::move(other)](const char* doing, const detail::Path& where) {
          if (!done_ && operation == doing && path == where) {
            done_ = true;
            other();
          }
        }) {}
  bool done() const {
    return done_;
  }

 private:
  bool done_ = false;
  ChangeHook hook_;
};

// ------------------------------------------------------------ Data loss

TEST(CheckpointCorners, WhatIsNoCheckpointIsNotReplacedEither) {
  const auto path = temporary_folder() + "/checkpoint";
  save(numbered(1), path);
  {
    const Between between(
        "rename", path, [&] { set_file_text(path + "/thesis.txt", "years of work"); });
    message_of<CheckpointError>([&] { save(numbered(2), path); });
  }
  EXPECT_EQ(file_text(path + "/thesis.txt"), "years of work");
}

TEST(CheckpointCorners, LatestOfTwoSaversNamesACompleteOne) {
  const auto root = temporary_folder() + "/run";
  {
    // Step 1 is in place, but not the latest yet; step 2 comes, and keeps one.
    const Between between(
        "fsync", root, [&] { CheckpointSeries(root, {.keep = 1}).save(2, numbered(2)); });
    CheckpointSeries(root, {.keep = 1}).save(1, numbered(1));
    ASSERT_TRUE(between.done());
  }
  EXPECT_NO_THROW(number_in(root + "/latest"));
}

TEST(CheckpointCorners, TwoSaversOfASeriesBothSucceed) {
  for (const std::string name : {"latest", "step_00000001.fsdp-removing"}) {
    SCOPED_TRACE(name);
    const auto root = temporary_folder() + "/run";
    CheckpointSeries series(root, {.keep = 1});
    series.save(1, numbered(1));
    {
      const Between between("rename", root + "/" + name, [&] {
        CheckpointSeries(root, {.keep = 1}).save(3, numbered(3));
      });
      EXPECT_NO_THROW(series.save(2, numbered(2)));
      ASSERT_TRUE(between.done());
    }
    EXPECT_NO_THROW(number_in(root + "/latest"));
  }
}

TEST(CheckpointCorners, TheLastGoodOneStaysUntilTheNextIsComplete) {
  // Killed between the two renames, where a file system cannot exchange.
  const auto path = temporary_folder() + "/checkpoint";
  const auto dead = path + ".fsdp-saving";
  save(numbered(7), path);
  detail::make_folders(dead + "/1/data");
  set_file_text(dead + "/lock", "");
  detail::rename_path(path, dead + "/1/old");
  make_old(dead);
  {
    const auto hook = ChangeHook::failing("write", "manifest.json", "no space");
    message_of<CheckpointError>([&] { save(numbered(8), path); });
  }
  EXPECT_TRUE(detail::path_exists(path) || detail::path_exists(dead + "/1/old"))
      << "the only complete checkpoint is gone, and no other is there";
}

TEST(CheckpointCorners, FoldersOfTheUserAreNotLeftovers) {
  const auto root = temporary_folder() + "/run";
  const auto mine = root + "/step_00000001.tmp-with-the-good-loss";
  CheckpointSeries series(root);
  series.save(1, numbered(1));
  detail::rename_path(root + "/step_00000001", mine);
  make_old(mine);
  series.save(2, numbered(2));
  EXPECT_TRUE(detail::path_exists(mine));
}

TEST(CheckpointCorners, AClockThatWentBackDoesNotHideTheLastOne) {
  const auto root = temporary_folder() + "/run";
  CheckpointSeries series(root, {.keep = 2});
  series.save(10, numbered(10));
  const auto folder = root + "/step_00000010";
  const auto text = file_text(folder + "/manifest.json");
  const auto at = text.find("\"time\":") + 7;
  const auto time = text.substr(at, text.find(',', at) - at);
  // Another host saved it, whose clock is an hour ahead.
  const auto later = std::to_string(std::stoll(time) + 3'600'000'000'000);
  edit_manifest(folder, "\"time\":" + time, "\"time\":" + later);
  series.save(20, numbered(20));
  series.save(30, numbered(30));
  EXPECT_EQ(number_in(root + "/latest"), 30);
  EXPECT_EQ(series.latest()->filename(), "step_00000030") << "what --resume takes";
  EXPECT_EQ(series.list().size(), 2u);
  EXPECT_TRUE(detail::path_exists(root + "/step_00000020")) << "one of the newest two";
}

TEST(CheckpointCorners, FoldersThatAreMadeAreSyncedToo) {
  const auto folder = temporary_folder();
  std::set<std::string> synced;
  {
    const ChangeHook hook([&](const char* operation, const detail::Path& where) {
      if (std::string(operation) == "fsync") {
        synced.insert(where.string());
      }
    });
    save(numbered(1), folder + "/a/b/checkpoint");
  }
  EXPECT_TRUE(synced.count(folder + "/a/b"));
  EXPECT_TRUE(synced.count(folder + "/a")) << "b is in it";
  EXPECT_TRUE(synced.count(folder)) << "a is in it";
}

// ------------------------------------------------------------ Incomplete ones

/// Rows on two ranks, as step 1 of a series.
void save_rows(const std::string& root) {
  run_ranks(2, [&](int) {
    auto state = state_with("w", distribute_tensor(torch::ones({6, 2}), world_mesh(), {Shard{0}}));
    CheckpointSeries(root).save(1, state);
  });
}

TEST(CheckpointCorners, OursWithoutItsManifestIsNotComplete) {
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

TEST(CheckpointCorners, ANumberedFileThatIsMissingIsNoticedWithoutAnIndex) {
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

// ------------------------------------------------------------ Hangs

TEST(CheckpointCorners, AfterAFailedAsyncSaveTheNextCallIsTheSameOnAllRanks) {
  const auto folder = temporary_folder();
  std::atomic<int> num_failed{0};
  const auto all = [&] {
    run_ranks(2, [&](int) {
      // More than there is memory for on the rank that writes it; the other hears of it
      // in the background.
      auto huge = state_with("w", torch::ones({1}).expand({int64_t{1} << 50}));
      std::future<void> future;
      try {
        future = async_save(huge, folder + "/huge");
      } catch (const std::exception&) {
      }
      if (future.valid()) {
        future.wait();
      }
      default_group().barrier();
      try {
        save(numbered(1), folder + "/fine");
      } catch (const CheckpointError&) {
        ++num_failed;
        for (int i = 0; i < 500 && num_failed < 2; ++i) {
          std::this_thread::sleep_for(10ms);
        }
        if (num_failed < 2) {
          throw std::runtime_error("this rank threw, the other waits for it in a collective");
        }
      }
    });
  };
  EXPECT_NO_THROW(all());
  EXPECT_NE(num_failed, 1);
}

TEST(CheckpointCorners, ATimeoutMayBeForever) {
  const auto path = temporary_folder() + "/checkpoint";
  const ChangeHook hook([](const char*, const detail::Path& where) { // rank 0 has to wait
    if (where.string().find("rank_00001") != std::string::npos) {
      std::this_thread::sleep_for(20ms);
    }
  });
  run_ranks(2, [&](int) {
    EXPECT_NO_THROW(save(numbered(1), path, {.timeout = std::chrono::milliseconds::max()}));
  });
}

TEST(CheckpointCorners, ThreadsWithoutAWorldMaySaveAtOnce) {
  expect_ranks_pass(1, [&] { // may end the process
    const auto path = temporary_folder();
    const ChangeHook hook(
        [](const char*, const detail::Path&) { std::this_thread::sleep_for(5ms); });
    auto first = async_save(numbered(0), path + "/0");
    std::vector<std::thread> threads;
    for (int64_t i = 1; i <= 2; ++i) {
      threads.emplace_back([&, i] {
        for (int j = 0; j < 3; ++j) {
          async_save(numbered(i), path + "/" + std::to_string(i)).get();
        }
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
    EXPECT_EQ(number_in(path + "/1"), 1);
    EXPECT_EQ(number_in(path + "/2"), 2);
  });
}

// ------------------------------------------------------------ Loads

TEST(CheckpointCorners, NothingIsChangedWhereATensorCannotBeWritten) {
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

TEST(CheckpointCorners, NumbersThatDoNotFitAreRefused) {
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

TEST(CheckpointCorners, LoadingConvertsWithoutHoldingTheFilesDtype) {
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

TEST(CheckpointCorners, ARankReadsOnlyWhatItNeeds) {
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

// ------------------------------------------------------------ Optimizers

TEST(CheckpointCorners, StepsThatAreNoNumbersOfStepsAreRefused) {
  run_ranks(2, [](int) {
    auto net = seeded<MLP>(4);
    fully_shard(net);
    optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
    for (const double step : {double{INFINITY}, 1e300}) {
      SCOPED_TRACE_OF(step);
      auto state = get_optimizer_state_dict(net, optimizer);
      state.set("state.in_proj.weight.step", step);
      message_of<c10::ValueError>([&] { set_optimizer_state_dict(net, optimizer, state); });
    }
  });
}

// ------------------------------------------------------------ Changed on the way

TEST(ConvertCorners, TensorsMayBeChangedOnTheWay) {
  const auto folder = temporary_folder();
  run_ranks(1, [&](int) { save(numbered(3), folder + "/in"); });
  const auto convert = [&](auto change, ConvertOptions::Format format) {
    convert_checkpoint(
        folder + "/in", folder + "/out",
        {.format = format, .dtype = torch::kDouble, .overwrite = true, .change = change});
  };
  const auto full = ConvertOptions::Format::full;
  convert([](const std::string&, const at::Tensor& w) { return w.to(torch::kFloat) * 0.5; }, full);
  auto state = state_with("w", torch::zeros({4}, torch::kLong));
  load(state, folder + "/out");
  EXPECT_SAME(std::get<at::Tensor>(state.at("w")), torch::full({4}, 1)); // in int64, as it was
  const auto cut = [](const std::string&, const at::Tensor& w) { return w.narrow(0, 0, 2); };
  EXPECT_TRUE(contains(
      message_of<CheckpointError>([&] { convert(cut, full); }), "a tensor of shape [2] of w"));
  EXPECT_TRUE(contains(
      message_of<c10::ValueError>([&] { convert(cut, ConvertOptions::Format::sharded); }),
      "the format must be full"));
}

} // namespace
} // namespace fsdp
