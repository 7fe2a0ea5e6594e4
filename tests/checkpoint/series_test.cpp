// Saves in the background, and series of checkpoints.

#include <fsdp/checkpoint.h>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/check.h"
#include "checkpoint/numbered.h"

namespace fsdp {
namespace {

using namespace test;
using namespace std::chrono_literals;

TEST(AsyncSave, HoldsTheValuesOfTheCall) {
  const auto path = temporary_folder() + "/checkpoint";
  run_ranks(3, [&](int) {
    const auto samples = samples_1d();
    auto state = make_state(samples, world_mesh(), 5);
    auto future = async_save(state, path);
    for (const auto& [key, value] : state) { // training goes on
      if (const auto* spread = std::get_if<DTensor>(&value)) {
        spread->to_local().zero_();
      } else if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
        tensor->zero_();
      }
    }
    future.get();
    auto read = make_state(samples, world_mesh(), 0);
    load(read, path);
    expect_state(read, samples, 5);
  });
}

/// They are copied by lines of the cache, from several places at once.
TEST(AsyncSave, BytesOfAnyNumberFromAnywhere) {
  const auto path = temporary_folder() + "/checkpoint";
  const auto bytes = torch::arange(70'000).remainder(251).to(torch::kByte);
  const auto parts = [&](const torch::Tensor& from) {
    StateDict state;
    for (const int64_t size : {0, 1, 63, 255, 256, 257, 511, 512, 1025, 4096, 65'535, 69'000}) {
      state.insert(std::to_string(size), from.narrow(0, size % 64 + 1, size));
    }
    return state;
  };
  const auto source = bytes.clone();
  auto future = async_save(parts(source), path);
  source.zero_();
  future.get();
  for (const auto& [key, expected] : parts(bytes)) {
    auto read = state_with(
        key,
        torch::zeros_like(std::get<at::Tensor>(expected))); // one at a time: the parts share memory
    load(read, path);
    EXPECT_SAME(std::get<at::Tensor>(read.at(key)), std::get<at::Tensor>(expected)) << key;
  }
}

TEST(AsyncSave, ConjugatesAndNegativesAreWhatTheyStandFor) {
  const auto path = temporary_folder() + "/checkpoint";
  const auto x = torch::complex(torch::arange(4.0), torch::ones(4));
  auto state = state_with("conjugate", x.conj());
  state.insert("negative", torch::imag(x.conj()));
  async_save(state, path).get();
  auto read = state_with("conjugate", torch::zeros(4, torch::kComplexFloat).conj());
  read.insert("negative", torch::imag(torch::zeros(4, torch::kComplexFloat).conj()));
  load(read, path);
  EXPECT_SAME(std::get<at::Tensor>(read.at("conjugate")).resolve_conj(), x.conj().resolve_conj());
  EXPECT_SAME(std::get<at::Tensor>(read.at("negative")).resolve_neg(), -torch::ones(4));
}

/// Where all cores train, a save has to wait for them.
TEST(AsyncSave, GivesWayToTraining) {
  const auto path = temporary_folder() + "/checkpoint";
  const auto priority = [] { return getpriority(PRIO_PROCESS, static_cast<id_t>(gettid())); };
  std::atomic<int> of_writes{-100};
  const ChangeHook hook([&](const char* operation, const detail::Path&) {
    if (std::string(operation) == "write") {
      of_writes = priority();
    }
  });
  const int mine = priority();
  auto state = state_with("w", torch::ones({4}));
  async_save(state, path).get();
  EXPECT_EQ(of_writes, std::max(mine, 10));
  save(state, path); // waited for
  EXPECT_EQ(of_writes, mine);
}

TEST(AsyncSave, OneAtATime) {
  const auto folder = temporary_folder();
  std::atomic<bool> slow{true};
  const ChangeHook hook([&](const char*, const detail::Path&) {
    if (slow) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  run_ranks(2, [&](int) {
    const auto state = make_state(samples_1d(), world_mesh(), 5);
    const auto first = async_save(state, folder + "/first");
    auto second = async_save(state, folder + "/second");
    EXPECT_EQ(first.wait_for(std::chrono::seconds(0)), std::future_status::ready);
    second.get();
  });
  slow = false;
  expect_loads(1, folder + "/first", 5);
  expect_loads(1, folder + "/second", 5);
}

TEST(AsyncSave, ErrorsAreInTheFutureAndAtTheNextCall) {
  const auto folder = temporary_folder();
  run_ranks(2, [&](int) {
    const auto state = make_state(samples_1d(), world_mesh(), 5);
    std::future<void> future;
    {
      default_group().barrier();
      std::optional<ChangeHook> hook;
      if (get_rank() == 0) {
        hook.emplace([](const char* operation, const detail::Path& where) {
          if (std::string(operation) == "fsync" && where.filename() == "rank_00001.safetensors") {
            FSDP_THROW(CheckpointError, "the disk is gone");
          }
        });
      }
      default_group().barrier();
      future = async_save(state, folder + "/checkpoint");
      EXPECT_TRUE(contains(message_of<CheckpointError>([&] { future.get(); }), "the disk is gone"));
      default_group().barrier();
    }
    auto same = make_state(samples_1d(), world_mesh(), 6);
    const auto load_message =
        message_of<CheckpointError>([&] { load(same, folder + "/checkpoint"); });
    EXPECT_TRUE(contains(load_message, "rank 1: the disk is gone"));
    save(state, folder + "/checkpoint"); // said once
    async_save(make_state(samples_1d(), world_mesh(), 4), folder + "/checkpoint");
    load(same, folder + "/checkpoint"); // what was saved last
    async_save(state, folder + "/checkpoint");
  });
  expect_loads(2, folder + "/checkpoint", 5);
}

TEST(AsyncSave, AfterAFailedAsyncSaveTheNextCallIsTheSameOnAllRanks) {
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

TEST(AsyncSave, ThreadsWithoutAWorldMaySaveAtOnce) {
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

std::vector<int64_t> steps_of(const CheckpointSeries& series) {
  std::vector<int64_t> steps;
  for (const auto& [step, path] : series.list()) {
    steps.push_back(step);
  }
  return steps;
}

TEST(CheckpointSeries, KeepsTheNewestAndEveryMth) {
  const auto root = temporary_folder() + "/run";
  run_ranks(2, [&](int) {
    CheckpointSeries series(root, {.keep = 2, .keep_every = 30});
    EXPECT_EQ(series.latest(), std::nullopt);
    const auto state = make_state(samples_1d(), world_mesh(), 5);
    for (int64_t step = 10; step <= 80; step += 10) {
      if (step % 20 == 0) {
        series.save(step, state);
      } else {
        series.async_save(step, state).get();
      }
      EXPECT_EQ(series.latest()->filename().string(), "step_000000" + std::to_string(step));
      default_group().barrier();
    }
    EXPECT_EQ(steps_of(series), (std::vector<int64_t>{30, 60, 70, 80}));
  });
  expect_loads(3, root + "/latest", 5);
  EXPECT_TRUE(leftovers(root).empty());
}

TEST(CheckpointSeries, GoesByWhatIsCompleteAndNew) {
  const auto root = temporary_folder() + "/run";
  const CheckpointSeries reader(root);
  CheckpointSeries series(root, {.keep = 5});
  auto state = state_with("w", torch::ones({4}));
  for (const int64_t step : {10, 20, 30}) {
    series.save(step, state);
  }
  ASSERT_EQ(unlink((root + "/step_00000030/rank_00000.safetensors").c_str()), 0);
  EXPECT_EQ(reader.latest()->filename(), "step_00000020") << "30 has lost a file";
  series.save(15, state); // a run that went back
  EXPECT_EQ(reader.latest()->filename(), "step_00000015");
  EXPECT_EQ(steps_of(reader), (std::vector<int64_t>{10, 15, 20}));
}

TEST(CheckpointSeries, AClockThatWentBackDoesNotHideTheLastOne) {
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

TEST(CheckpointSeries, AFailedSaveRemovesNothing) {
  const auto root = temporary_folder() + "/run";
  CheckpointSeries series(root, {.keep = 1});
  auto state = state_with("w", torch::ones({4}));
  series.save(1, state);
  {
    const ChangeHook hook([](const char* operation, const detail::Path& where) {
      if (std::string(operation) == "rename" && where.filename() == "step_00000002") {
        FSDP_THROW(CheckpointError, "no");
      }
    });
    message_of<CheckpointError>([&] { series.save(2, state); });
  }
  EXPECT_EQ(steps_of(series), (std::vector<int64_t>{1}));
  series.save(3, state);
  EXPECT_EQ(steps_of(series), (std::vector<int64_t>{3}));
}

/// A run that is resumed asks for this, and cannot wait for a minute.
TEST(CheckpointSeries, RemovesWhatDeadSavesOfThisMachineLeft) {
  const auto root = temporary_folder();
  char host[256] = {};
  ASSERT_EQ(gethostname(host, sizeof(host) - 1), 0);
  const auto left_by = [&](const char* name, const std::string& lock) {
    const auto folder = root + "/" + name;
    detail::make_folder(folder);
    detail::make_folder(folder + "/id");
    set_file_text(folder + "/lock", lock);
    return folder;
  };
  const auto here = c10::str("process 1 on ", host, " since 2026-01-01 00:00:00 UTC");
  const auto dead = left_by("step_00000001.fsdp-saving", here);
  const auto alive = left_by("step_00000002.fsdp-saving", here);
  const auto lock = detail::File::create(alive + "/lock");
  ASSERT_TRUE(lock.try_lock());
  const auto elsewhere = left_by("step_00000003.fsdp-saving", "process 1 on another since 2026");
  const auto begun = left_by("step_00000004.fsdp-saving", "");
  const auto removing = left_by("step_00000005.fsdp-removing", "");
  const auto mine = left_by("mine.fsdp-saving", here);
  CheckpointSeries(root).remove_leftovers();
  EXPECT_FALSE(detail::path_exists(dead));
  EXPECT_FALSE(detail::path_exists(removing));
  EXPECT_TRUE(detail::path_exists(alive)) << "its lock is held";
  EXPECT_TRUE(detail::path_exists(elsewhere)) << "its lock may not be seen here";
  EXPECT_TRUE(detail::path_exists(begun)) << "its process may be about to lock it";
  EXPECT_TRUE(detail::path_exists(mine)) << "not of the series";
}

} // namespace
} // namespace fsdp
