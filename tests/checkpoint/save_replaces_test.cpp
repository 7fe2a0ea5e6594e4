// What a save replaces and removes, also beside other savers; and which files it syncs.
#include <fsdp/checkpoint.h>

#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <thread>

#include "checkpoint/numbered.h"

namespace fsdp {
namespace {

using namespace test;
using namespace std::chrono_literals;

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

TEST(SaveReplaces, WhatIsNoCheckpointIsNotReplacedEither) {
  const auto path = temporary_folder() + "/checkpoint";
  save(numbered(1), path);
  {
    const Between between(
        "rename", path, [&] { set_file_text(path + "/thesis.txt", "years of work"); });
    message_of<CheckpointError>([&] { save(numbered(2), path); });
  }
  EXPECT_EQ(file_text(path + "/thesis.txt"), "years of work");
}

TEST(SaveReplaces, LatestOfTwoSaversNamesACompleteOne) {
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

TEST(SaveReplaces, TwoSaversOfASeriesBothSucceed) {
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

TEST(SaveReplaces, TheLastGoodOneStaysUntilTheNextIsComplete) {
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

TEST(SaveReplaces, FoldersOfTheUserAreNotLeftovers) {
  const auto root = temporary_folder() + "/run";
  const auto mine = root + "/step_00000001.tmp-with-the-good-loss";
  CheckpointSeries series(root);
  series.save(1, numbered(1));
  detail::rename_path(root + "/step_00000001", mine);
  make_old(mine);
  series.save(2, numbered(2));
  EXPECT_TRUE(detail::path_exists(mine));
}

TEST(SaveFiles, FoldersThatAreMadeAreSyncedToo) {
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

TEST(SaveFiles, ATimeoutMayBeForever) {
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

} // namespace
} // namespace fsdp
