// Ranks that die, and disks that are full, while a checkpoint is being replaced.
// Ranks are forked: what follows begin_save needs no process group.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "checkpoint/checkpoints.h"
#include "checkpoint/writer.h"
#include "support/processes.h"

namespace fsdp {
namespace {

using namespace test;

constexpr int kRanks = 2;

StateDict state_of(int64_t generation, int64_t numel = 20) {
  StateDict state;
  for (int i = 0; i < 5; ++i) {
    state.insert("w" + std::to_string(i), torch::full({numel + i}, generation));
  }
  state.insert("generation", generation);
  return state;
}

/// The generation that `path` holds; all of its tensors must be of it.
int64_t loaded_generation(const std::string& path, int64_t numel = 20) {
  auto state = state_of(-1, numel);
  load(state, path);
  const auto generation = std::get<int64_t>(state.at("generation"));
  for (const auto& [key, value] : state_of(generation, numel)) {
    if (const auto* expected = std::get_if<at::Tensor>(&value)) {
      EXPECT_SAME(std::get<at::Tensor>(state.at(key)), *expected) << key;
    }
  }
  return generation;
}

/// A save by kRanks ranks, as begin_save makes it.
std::vector<detail::SaveJob> jobs_of(
    int64_t generation, const std::string& path, int64_t numel = 20) {
  const auto state = state_of(generation, numel);
  const auto request = detail::make_request(state);
  detail::Publication publication{.target = path};
  publication.ranks.size = kRanks;
  publication.ranks.timeout = std::chrono::seconds(20);
  // Stores are never destroyed: ~FileStore reads for ever where a killed rank has left half a
  // record.
  static auto& stores = *new std::vector<c10::intrusive_ptr<c10d::Store>>();
  stores.push_back(c10::make_intrusive<c10d::FileStore>(temporary_folder() + "/store", kRanks));
  publication.ranks.store = stores.back();
  detail::prepare(publication);
  std::vector<detail::SaveJob> jobs;
  for (int rank = 0; rank < kRanks; ++rank) {
    publication.ranks.rank = rank;
    jobs.push_back(
        {publication,
         detail::make_plan(
             state, rank, {request.list}, std::vector<std::string>(kRanks, request.mesh_indices))});
  }
  return jobs;
}

/// Runs `body` in a process; exit code 1 where it throws CheckpointError.
pid_t fork_child(const std::function<void()>& body) {
  const auto pid = fork();
  if (pid == 0) {
    int code = 0;
    try {
      body();
    } catch (const CheckpointError&) {
      code = 1;
    } catch (...) {
      code = 2;
    }
    _exit(code);
  }
  return pid;
}

/// Runs a rank's part in a process, which calls `prepare_child` first.
pid_t fork_rank(const detail::SaveJob& job, const std::function<void()>& prepare_child) {
  return fork_child([&] {
    prepare_child();
    detail::run_save(job);
  });
}

void kill_at(int change) {
  detail::before_change = [left = change](const char*, const detail::Path&) mutable {
    if (left-- == 0) {
      kill(getpid(), SIGKILL);
    }
  };
}

/// Runs `body` in a process that is killed before it changes the file system for the
/// `change`th time; false where it ends before.
bool is_killed_at(int change, const std::function<void()>& body) {
  int status = 0;
  const auto pid = fork_child([&] {
    kill_at(change);
    body();
  });
  waitpid(pid, &status, 0);
  const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  EXPECT_TRUE(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) << status;
  return killed;
}

TEST(KilledSave, TheLastGoodCheckpointLoadsEveryTime) {
  const auto path = temporary_folder() + "/checkpoint";
  save(state_of(0), path);
  std::mt19937 random(11);
  int64_t last = 0;
  int num_killed = 0;
  int num_replaced = 0;
  constexpr int kMostChanges = 32; // of rank 0; the others make fewer
  while (num_killed < 200) {
    const auto generation = last + 1;
    const auto jobs = jobs_of(generation, path);
    const int victim = random() % 3 == 0 ? 1 : 0;
    const auto change = static_cast<int>(random() % kMostChanges);
    pid_t pids[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) {
      pids[rank] = fork_rank(jobs[rank], [&] {
        if (rank == victim) {
          kill_at(change);
        }
      });
    }
    int status = 0;
    waitpid(pids[victim], &status, 0);
    const bool killed = WIFSIGNALED(status);
    ASSERT_TRUE(killed || WEXITSTATUS(status) == 0);
    if (killed) { // a launcher ends the others a moment later
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      kill(pids[1 - victim], SIGKILL);
    }
    waitpid(pids[1 - victim], nullptr, 0);
    const auto found = loaded_generation(path);
    ASSERT_TRUE(found == last || found == generation) << found;
    ASSERT_TRUE(killed || found == generation);
    num_killed += killed;
    num_replaced += killed && found == generation;
    last = found;
  }
  EXPECT_GT(num_replaced, 0) << "no kill came after the new one was in place";
  save(state_of(1000), path); // what the dead have left is in nobody's way
  EXPECT_EQ(loaded_generation(path), 1000);
}

/// Not only between two changes: in the middle of a write, a sync or a checksum as well.
TEST(KilledSave, AtAnyMoment) {
  constexpr int64_t kNumel = 250'000; // of 8 bytes
  const auto path = temporary_folder() + "/checkpoint";
  save(state_of(0, kNumel), path);
  std::mt19937 random(5);
  std::chrono::microseconds longest(100'000); // that a save took
  int64_t last = 0;
  int num_killed = 0;
  int num_finished = 0;
  while (num_killed < 40) {
    const auto generation = last + 1;
    auto jobs = jobs_of(generation, path, kNumel);
    for (auto& job : jobs) {
      job.is_direct = num_killed % 2 == 0;
    }
    const auto start = std::chrono::steady_clock::now();
    pid_t pids[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) {
      pids[rank] = fork_rank(jobs[rank], [] {});
    }
    // Every fourth runs to its end, and tells how long that is.
    if ((num_killed + num_finished) % 4 != 0) {
      std::this_thread::sleep_for(longest * static_cast<int>(random() % 1000) / 1000);
      for (const auto pid : pids) {
        kill(pid, SIGKILL);
      }
    }
    bool killed = false;
    for (const auto pid : pids) {
      int status = 0;
      waitpid(pid, &status, 0);
      killed = killed || WIFSIGNALED(status);
      ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << status;
    }
    const auto found = loaded_generation(path, kNumel);
    ASSERT_TRUE(found == last || found == generation) << found;
    ASSERT_TRUE(killed || found == generation);
    if (!killed) {
      longest = std::chrono::duration_cast<std::chrono::microseconds>(
          std::chrono::steady_clock::now() - start);
    }
    num_killed += killed;
    num_finished += !killed;
    last = found;
  }
}

TEST(KilledSave, TheFirstOneIsThereCompleteOrNotAtAll) {
  int change = 0;
  for (bool killed = true; killed; ++change) {
    SCOPED_TRACE(change);
    const auto path = temporary_folder() + "/runs/first/checkpoint";
    killed = is_killed_at(change, [&] { save(state_of(1), path); });
    const bool saved = detail::path_exists(path);
    ASSERT_TRUE(saved || killed);
    ASSERT_TRUE(!saved || loaded_generation(path) == 1);
    save(state_of(2), path);
    ASSERT_EQ(loaded_generation(path), 2);
  }
  EXPECT_GT(change, 15);
}

/// The folder of the save that died last, in TARGET.fsdp-saving.
detail::Path work_in(const detail::Path& saving) {
  auto names = detail::list_folder(saving);
  std::erase(names, "lock");
  return saving / names.back();
}

/// With a file system that exchanges two folders, and with one that cannot.
class KilledReplacement : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    detail::has_exchange = GetParam();
  }
  void TearDown() override {
    detail::has_exchange = true;
  }
};

/// From the first folder that is made to the last that is removed.
TEST_P(KilledReplacement, LeavesOneThatLoads) {
  const detail::Path folder = temporary_folder();
  const auto path = (folder / "checkpoint").string();
  save(state_of(0), path);
  int64_t last = 0;
  int num_gaps = 0;
  const auto replace = [&](int change) {
    const bool killed = is_killed_at(change, [&] { save(state_of(last + 1), path); });
    if (!detail::path_exists(path)) { // between the calls that take the place of an exchange
      ++num_gaps;
      const auto left = folder / leftovers(folder).back();
      EXPECT_EQ(loaded_generation(work_in(left) / "old"), last);
      // A later saver puts it back, and others if that one is killed as well.
      const auto now = detail::changed_at(left) + 100;
      const auto tidy = [&] { detail::remove_leftovers(folder, "checkpoint.fsdp-", now); };
      for (int step = 0; is_killed_at(step, tidy); ++step) {
      }
    }
    const auto found = loaded_generation(path);
    EXPECT_TRUE(found == last || found == last + 1) << found;
    EXPECT_TRUE(killed || found == last + 1);
    last = found;
    return killed;
  };
  for (int round = 0; round < 2; ++round) { // the second beside what the first has left
    for (int change = 0; replace(change); ++change) {
      SCOPED_TRACE_OF(round, change);
      ASSERT_FALSE(HasFailure());
    }
  }
  EXPECT_GT(last, 4) << "no kill came after the new one was in place";
  EXPECT_EQ(num_gaps > 0, !GetParam());
}

INSTANTIATE_TEST_SUITE_P(
    Files, KilledReplacement, testing::Bool(), testing::PrintToStringParamName());

/// From the first folder to the last of the rotation.
TEST(KilledSave, ASeriesAlwaysHasALastOne) {
  const auto root = temporary_folder() + "/run";
  const CheckpointSeries series(root, {.keep = 2});
  int64_t step = 1;
  CheckpointSeries(series).save(step, state_of(step));
  int num_killed = 0;
  int num_finished = 0;
  for (int change = 0; num_finished < 3; ++change) { // beyond the last change nothing kills
    ASSERT_LT(change, 200);
    const auto next = step + 1;
    const bool killed =
        is_killed_at(change, [&] { CheckpointSeries(series).save(next, state_of(next)); });
    const auto latest = series.latest();
    ASSERT_TRUE(latest) << "killed at change " << change;
    const auto found = loaded_generation(latest->string());
    ASSERT_TRUE(found == step || found == next) << found;
    ASSERT_TRUE(killed || found == next);
    // What the link names is older where kills came before it was set, but complete.
    (void)loaded_generation(root + "/latest");
    for (const auto& [number, path] : series.list()) {
      ASSERT_EQ(loaded_generation(path.string()), number);
    }
    num_killed += killed;
    num_finished += !killed;
    step = found;
  }
  EXPECT_GT(num_killed, 20);
  EXPECT_EQ(loaded_generation(root + "/latest"), step);
}

TEST(AsyncSave, IsFinishedBeforeTheProcessEnds) {
  const auto path = temporary_folder() + "/checkpoint";
  const auto ended = spawn_ranks(
      1,
      [] {
        // Its future is dropped, and nobody waits.
        (void)async_save(state_of(3), std::getenv("TEST_PATH"));
      },
      [&](int) { return Environment{{"TEST_PATH", path}}; });
  if (!ended.empty()) {
    EXPECT_EQ(ended[0].exit_code, 0) << ended[0].output;
    EXPECT_EQ(loaded_generation(path), 3);
  }
}

TEST(KilledSave, TheOthersNameWhoIsMissing) {
  const auto path = temporary_folder() + "/checkpoint";
  auto jobs = jobs_of(1, path);
  jobs[0].publication.ranks.timeout = std::chrono::milliseconds(100);
  const auto message = message_of<CheckpointError>([&] { detail::run_save(jobs[0]); });
  EXPECT_TRUE(contains(message, "rank 1 did not report"));
}

/// The calling process gets a disk of so many bytes there, which goes with it.
bool mount_disk(const std::string& folder, int64_t bytes) {
  const int flags = CLONE_NEWNS | (geteuid() == 0 ? 0 : CLONE_NEWUSER);
  return unshare(flags) == 0 && mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("none", folder.c_str(), "tmpfs", 0, c10::str("size=", bytes).c_str()) == 0;
}

/// Leaves that much room on the disk.
void fill_disk(const std::string& folder, int64_t left) {
  const auto file = folder + "/ballast";
  unlink(file.c_str());
  struct statvfs disk{};
  ASSERT_EQ(statvfs(folder.c_str(), &disk), 0);
  const int fd = open(file.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
  ASSERT_EQ(posix_fallocate(fd, 0, static_cast<int64_t>(disk.f_bavail * disk.f_bsize) - left), 0);
  close(fd);
}

/// By root, or where users may have namespaces of their own; else it is skipped.
TEST(FullDisk, WhereverItEnds) {
  constexpr int64_t kNumel = 2000; // of 8 bytes
  constexpr int64_t kDisk = 1 << 20;
  constexpr int64_t kPage = 4096;
  const auto fill_and_save = [&] {
    const auto folder = temporary_folder();
    if (!mount_disk(folder, kDisk)) {
      GTEST_SKIP() << "no disk may be mounted here";
    }
    const auto path = folder + "/checkpoint";
    save(state_of(0, kNumel), path);
    int num_failed = 0;
    int64_t last = 0;
    for (int64_t left = 0; last < 3; left += kPage) { // beyond enough nothing fails
      SCOPED_TRACE(c10::str(left, " bytes left"));
      ASSERT_LT(left, kDisk);
      fill_disk(folder, left);
      std::atomic<int> num_failed_ranks{0};
      run_ranks(kRanks, [&](int) {
        SCOPED_TRACE_OF(left);
        try {
          save(state_of(last + 1, kNumel), path);
        } catch (const CheckpointError& error) {
          ++num_failed_ranks;
          EXPECT_TRUE(contains(error.what(), "No space left on device"));
        }
      });
      const bool failed = num_failed_ranks > 0;
      EXPECT_TRUE(!failed || num_failed_ranks == kRanks);
      EXPECT_EQ(loaded_generation(path, kNumel), last + (failed ? 0 : 1));
      EXPECT_TRUE(leftovers(folder).empty());
      num_failed += failed;
      last += failed ? 0 : 1;
    }
    EXPECT_GT(num_failed, 10);
  };
  expect_ranks_pass(
      1, fill_and_save, [](int) { return Environment{{"RANK", ""}, {"WORLD_SIZE", ""}}; });
}

TEST(FullDisk, FailsOnAllRanksAndKeepsTheOldOne) {
  const auto path = temporary_folder() + "/checkpoint";
  save(state_of(7), path);
  const auto jobs = jobs_of(8, path);
  pid_t pids[kRanks];
  for (int rank = 0; rank < kRanks; ++rank) {
    pids[rank] = fork_rank(jobs[rank], [&] {
      if (rank == 1) { // files end after 500 bytes, as on a full disk
        signal(SIGXFSZ, SIG_IGN);
        const rlimit limit{500, 500};
        setrlimit(RLIMIT_FSIZE, &limit);
      }
    });
  }
  for (const auto pid : pids) {
    int status = 0;
    waitpid(pid, &status, 0);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 1); // CheckpointError
  }
  EXPECT_EQ(loaded_generation(path), 7);
}

TEST(Leftovers, OfDeadSavesGoWhenTheyAreOld) {
  const auto folder = temporary_folder();
  std::string dead;
  {
    const auto jobs = jobs_of(1, folder + "/checkpoint_1"); // and nobody carries on
    dead = jobs[0].publication.folder().string();
  }
  const auto now = detail::changed_at(dead);
  detail::remove_leftovers(folder, "checkpoint", now + 10);
  EXPECT_TRUE(detail::path_exists(dead)) << "too young";
  detail::remove_leftovers(folder, "other", now + 100);
  EXPECT_TRUE(detail::path_exists(dead)) << "of another";
  const auto alive = jobs_of(2, folder + "/checkpoint_2");
  detail::remove_leftovers(folder, "checkpoint", now + 100);
  EXPECT_FALSE(detail::path_exists(dead));
  EXPECT_TRUE(detail::path_exists(alive[0].publication.folder())) << "its lock is held";
}

/// A rank of a dead save that is late must not touch the next save.
TEST(DeadSave, ItsLateRankWritesToAFolderOfItsOwn) {
  const auto path = temporary_folder() + "/checkpoint";
  auto dead = jobs_of(1, path);
  auto late = dead[1];
  late.publication.lock.reset();
  dead.clear(); // and so is rank 0
  {
    const auto jobs = jobs_of(2, path);
    std::thread other([&] { detail::run_save(jobs[1]); });
    message_of<CheckpointError>([&] {
      late.publication.ranks.timeout = std::chrono::milliseconds(100);
      detail::run_save(late);
    });
    detail::run_save(jobs[0]);
    other.join();
  }
  EXPECT_EQ(loaded_generation(path), 2);
  EXPECT_TRUE(verify_checkpoint(path).problems.empty());
}

TEST(SecondSaver, IsRefusedAndToldWhoSaves) {
  const auto path = temporary_folder() + "/checkpoint";
  save(state_of(1), path);
  {
    const auto first = jobs_of(2, path);
    make_old(first[0].publication.work()); // it has been waiting for a slow rank
    const auto message = message_of<CheckpointError>([&] { save(state_of(3), path); });
    EXPECT_TRUE(contains(message, path + " is being saved already, by process "));
    EXPECT_TRUE(contains(message, std::to_string(getpid())));
    EXPECT_TRUE(detail::path_exists(first[0].publication.data())) << "the first goes on";
  }
  save(state_of(3), path); // the first one is dead now
  EXPECT_EQ(loaded_generation(path), 3);
  EXPECT_TRUE(leftovers(path + "/..").empty());
}

/// Of a series: they may be what fills the disk, and are of another step.
TEST(Leftovers, OfDeadSavesGoBeforeTheNextIsWritten) {
  const detail::Path root = temporary_folder();
  const auto dead = root / "step_00000001.fsdp-saving";
  detail::make_folder(dead);
  set_file_text(dead / "lock", "");
  make_old(dead);
  const ChangeHook hook([&](const char* operation, const detail::Path& path) {
    if (std::string(operation) == "write" && path.filename() != "lock") {
      EXPECT_FALSE(detail::path_exists(dead)) << path;
    }
  });
  CheckpointSeries(root).save(2, state_of(2));
  EXPECT_EQ(loaded_generation((root / "step_00000002").string()), 2);
}

} // namespace
} // namespace fsdp
