// What can be wrong with a checkpoint, and what can go wrong with a save.

#include <fsdp/checkpoint.h>
#include <fsdp/checkpoint_tools.h>

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <thread>

#include "base/check.h"
#include "checkpoint/checkpoints.h"
#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "process_group/observer.h"

namespace fsdp {
namespace {

using namespace test;

std::string saved_checkpoint() {
  const auto path = temporary_folder() + "/checkpoint";
  save_samples(3, path, 5);
  return path;
}

TEST(BrokenCheckpoint, FlippedBitsAreFoundWhereverTheyAre) {
  const auto path = saved_checkpoint();
  const auto catalog = detail::open_catalog(path);
  std::mt19937 random(1);
  for (const auto& tensor : catalog.tensors) {
    for (const auto& piece : tensor.pieces) {
      if (piece.box.numel() == 0) {
        continue;
      }
      const auto file = path + "/" + piece.file;
      const auto good = file_text(file);
      const auto bytes = static_cast<size_t>(*detail::tensor_bytes(piece.box.sizes, tensor.dtype));
      for (const size_t byte : {size_t{0}, random() % bytes, bytes - 1}) {
        const auto bit = random() % 8;
        SCOPED_TRACE(c10::str(tensor.name, " in ", piece.file, ", byte ", byte, ", bit ", bit));
        auto bad = good;
        auto& flipped = bad[static_cast<size_t>(piece.offset) + byte];
        flipped = static_cast<char>(flipped ^ (1 << bit));
        set_file_text(file, bad);
        const auto message = load_error(path);
        EXPECT_TRUE(contains(message, piece.file));
        EXPECT_TRUE(contains(message, "'" + tensor.name + "'"));
        EXPECT_TRUE(contains(message, "checksum"));
      }
      set_file_text(file, good);
    }
  }
  expect_loads(2, path, 5);
}

TEST(BrokenCheckpoint, IsReadAsItIsWhereNobodyAsks) {
  const auto path = temporary_folder() + "/checkpoint";
  auto state = state_with("w", torch::zeros({8}, torch::kByte));
  save(state, path);
  const auto file = path + "/rank_00000.safetensors";
  auto text = file_text(file);
  text.back() = 5;
  set_file_text(file, text);
  EXPECT_TRUE(contains(message_of<CheckpointError>([&] { load(state, path); }), "checksum"));
  load(state, path, {.verify = false});
  EXPECT_EQ(std::get<at::Tensor>(state.at("w"))[7].item<int64_t>(), 5);
}

TEST(BrokenCheckpoint, FlippedBitInTheManifest) {
  const auto path = saved_checkpoint();
  auto text = file_text(path + "/manifest.json");
  text[text.find("\"step\",") + 7] ^= 1; // 5 becomes 4: only the checksum can tell
  set_file_text(path + "/manifest.json", text);
  EXPECT_TRUE(contains(load_error(path), "manifest.json: is damaged"));
}

/// We do not read it, but other programs do.
TEST(BrokenCheckpoint, VerifyFindsEveryFlippedBitOfAHeader) {
  const auto path = temporary_folder() + "/checkpoint";
  run_ranks(2, [&](int) {
    auto state = state_with("w", distribute_tensor(torch::ones({4}), world_mesh(), {Shard{0}}));
    save(state, path);
  });
  EXPECT_TRUE(verify_checkpoint(path).problems.empty());
  const auto file = path + "/rank_00001.safetensors";
  const auto good = file_text(file);
  ASSERT_TRUE(contains(good, R"({\"w\":{\"saved_offsets\":[2]}})"));
  const auto header_bytes = good.size() - 2 * sizeof(float);
  for (size_t i = 0; i < header_bytes; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      auto bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      set_file_text(file, bad);
      const auto problems = verify_checkpoint(path).problems;
      ASSERT_FALSE(problems.empty()) << "byte " << i << ", bit " << bit;
      ASSERT_TRUE(contains(problems[0], file));
    }
  }
}

TEST(BrokenCheckpoint, TruncatedFile) {
  const auto path = saved_checkpoint();
  const auto file = path + "/rank_00001.safetensors";
  const auto text = file_text(file);
  for (const size_t length : {text.size() - 1, size_t{100}, size_t{0}}) {
    SCOPED_TRACE_OF(length);
    set_file_text(file, text.substr(0, length));
    const auto message = load_error(path);
    EXPECT_TRUE(contains(message, "rank_00001.safetensors"));
    EXPECT_TRUE(contains(message, "truncated"));
  }
}

TEST(BrokenCheckpoint, MissingFile) {
  const auto path = saved_checkpoint();
  ASSERT_EQ(unlink((path + "/rank_00002.safetensors").c_str()), 0);
  EXPECT_TRUE(contains(load_error(path), "rank_00002.safetensors"));
  // Without a manifest the shape is only known from the parts, but a gap is seen.
  ASSERT_EQ(unlink((path + "/manifest.json").c_str()), 0);
  load_error(path);
  EXPECT_TRUE(contains(load_error(path + "/nowhere"), "no such checkpoint"));
  EXPECT_TRUE(contains(load_error(temporary_folder()), "holds no checkpoint"));
}

/// What loading says after this edit of a manifest.
std::string error_after_edit(const std::string& from, const std::string& to) {
  const auto path = saved_checkpoint();
  edit_manifest(path, from, to);
  return load_error(path);
}

TEST(BrokenCheckpoint, UnknownVersion) {
  EXPECT_TRUE(contains(error_after_edit("\"version\":1", "\"version\":2"), "version 2"));
}

TEST(BrokenCheckpoint, DuplicateTensorAndDuplicateKey) {
  EXPECT_TRUE(
      contains(error_after_edit("\"name\":\"cols\"", "\"name\":\"rows\""), "'rows' occurs twice"));
  EXPECT_TRUE(contains(
      error_after_edit("\"version\":1", "\"version\":1,\"version\":1"), "'version' occurs twice"));
}

TEST(BrokenCheckpoint, PiecesThatOverlapOrLieElsewhere) {
  EXPECT_TRUE(contains(error_after_edit("\"offsets\":[5,0]", "\"offsets\":[4,0]"), "overlap"));
  EXPECT_TRUE(contains(
      error_after_edit("\"file\":\"rank_00000", "\"file\":\"../rank_00000"),
      "not the name of a file"));
}

TEST(BrokenCheckpoint, MissingKeyAndWrongShape) {
  const auto path = saved_checkpoint();
  run_ranks(2, [&](int rank) {
    auto state = state_with("plain", torch::zeros({7}, torch::kLong));
    if (rank == 1) {
      state.insert("more", torch::zeros({7}));
    }
    EXPECT_TRUE(contains(message_of<CheckpointError>([&] { load(state, path); }), "has no 'more'"));
    EXPECT_EQ(std::get<at::Tensor>(state.at("plain")).sum().item<int64_t>(), 0);
    load(state, path, {.strict = false});
    EXPECT_NE(std::get<at::Tensor>(state.at("plain")).sum().item<int64_t>(), 0);
    auto wrong = state_with("plain", torch::zeros({8}, torch::kLong));
    const auto message = message_of<CheckpointError>([&] { load(wrong, path); });
    EXPECT_TRUE(contains(message, "'plain'"));
    EXPECT_TRUE(contains(message, "[7]"));
    EXPECT_TRUE(contains(message, "[8]"));
    auto value = state_with("plain", int64_t{1});
    message_of<CheckpointError>([&] { load(value, path); });
    StateDict terms;
    const auto zeros = torch::zeros({7}, torch::kLong);
    terms.insert("plain", DTensor::from_local(zeros, world_mesh(), {Partial{}}));
    EXPECT_TRUE(
        contains(message_of<CheckpointError>([&] { load(terms, path); }), "terms of a sum"));
  });
}

/// Does something once, at the thread's third collective of a load, which compares ids: all
/// ranks have checked everything then, and none has changed anything.
class WhenAllHaveChecked : public detail::CollectiveObserver {
 public:
  explicit WhenAllHaveChecked(std::function<void()> step) : step_(std::move(step)) {}

  void on_collective(const detail::ObservedCollective&) override {
    if (++number_ == 3) {
      step_();
    }
  }

 private:
  std::function<void()> step_;
  int number_ = 0;
};

TEST(BrokenCheckpoint, AFileThatGoesAfterItWasFound) {
  const auto path = saved_checkpoint();
  const auto catalog = detail::open_catalog(path);
  const auto& stored = *catalog.find_tensor("plain");
  const auto file = path + "/" + stored.pieces[0].file;
  ASSERT_EQ(unlink(file.c_str()), 0);
  const auto target = detail::local_tensor(torch::zeros({7}, torch::kLong));
  const auto message = message_of<CheckpointError>(
      [&] { detail::Reader(catalog, /*verify=*/true).read(stored, *target); });
  EXPECT_TRUE(contains(message, "tensor 'plain': " + file + " cannot be opened"));
}

/// One of others, without checksums or an id: nothing else would tell.
TEST(BrokenCheckpoint, AFolderThatIsReplacedWhileItIsRead) {
  const detail::Path folder = temporary_folder();
  auto state = state_with("a", torch::zeros({3}));
  state.insert("b", torch::zeros({3}));
  for (const auto* name : {"old", "new"}) {
    save_hf(state, folder / name, {.max_file_bytes = 12}); // a file for each
  }
  const auto catalog = detail::open_catalog(folder / "old");
  const auto target = detail::local_tensor(torch::zeros({3}));
  detail::Reader reader(catalog, /*verify=*/true);
  reader.read(*catalog.find_tensor("a"), *target);
  detail::rename_path(folder / "old", folder / "gone");
  detail::rename_path(folder / "new", folder / "old");
  const auto message =
      message_of<CheckpointError>([&] { reader.read(*catalog.find_tensor("b"), *target); });
  EXPECT_TRUE(contains(message, "was replaced by another while it was read"));
}

/// Too late to change nothing: all ranks are told what is left.
TEST(BrokenCheckpoint, AFileThatChangesAfterTheChecks) {
  const auto path = temporary_folder() + "/checkpoint";
  const auto file = path + "/rank_00001.safetensors"; // which only rank 1 reads
  const auto state_of = [](double number) {
    StateDict state;
    for (const auto* key : {"a", "b"}) {
      state.insert(key, distribute_tensor(torch::full({2, 3}, number), world_mesh(), {Shard{0}}));
    }
    return state;
  };
  run_ranks(2, [&](int) { save(state_of(5), path); });
  run_ranks(2, [&](int rank) {
    auto state = state_of(-1);
    std::string message;
    {
      const WhenAllHaveChecked change([&] {
        if (rank == 1) {
          set_file_text(file, file_text(file) + "more");
        }
      });
      message = message_of<CheckpointError>([&] { load(state, path); });
    }
    EXPECT_TRUE(contains(message, "partly loaded"));
    EXPECT_TRUE(contains(message, "rank 1: tensor 'a': " + file + " was changed"));
    for (const auto& [key, value] : state) {
      const auto local = std::get<DTensor>(value).to_local();
      EXPECT_SAME(local, torch::full_like(local, rank == 0 ? 5 : -1)) << key;
    }
    load(state, path); // which helps
    for (const auto& [key, value] : state) {
      EXPECT_SAME(whole(value), torch::full({2, 3}, 5.0)) << key;
    }
  });
}

void expect_save_fails(const std::string& path, const std::string& says) {
  run_ranks(3, [&](int) {
    const auto state = make_state(samples_1d(), world_mesh(), 6);
    EXPECT_TRUE(contains(message_of<CheckpointError>([&] { save(state, path); }), says));
  });
}

TEST(FailedSave, ARankThatFailsFailsAll) {
  const auto path = saved_checkpoint();
  for (const auto* file : {"rank_00001.safetensors", "rank_00000.json", "manifest.json"}) {
    SCOPED_TRACE(file);
    const auto hook = ChangeHook::failing("write", file, "no space");
    expect_save_fails(path, "no space");
  }
  expect_loads(2, path, 5);
  EXPECT_TRUE(leftovers(path + "/..").empty());
}

TEST(FailedSave, FolderThatCannotBeWritten) {
  expect_save_fails("/proc/fsdp_recompute/x", "/proc/fsdp_recompute");
}

/// Root may write anywhere, so a process of nobody's saves.
TEST(FailedSave, FolderThatMayNotBeWritten) {
  const auto* given = std::getenv("TEST_FOLDER"); // in that process
  const auto folder = given ? std::string(given) : temporary_folder();
  if (!given) {
    save_samples(2, folder + "/checkpoint", 5);
    ASSERT_EQ(chmod((folder + "/checkpoint").c_str(), 0755), 0); // whatever the umask
    ASSERT_EQ(chmod(folder.c_str(), 0555), 0);
  }
  expect_ranks_pass(
      1,
      [&] {
        if (geteuid() == 0) {
          constexpr uid_t kNobody = 65534;
          ASSERT_EQ(setresuid(kNobody, kNobody, kNobody), 0);
        }
        run_ranks(3, [&](int) {
          const auto state = make_state(samples_1d(), world_mesh(), 6);
          for (const auto* name : {"/checkpoint", "/new", "/below/new"}) {
            SCOPED_TRACE(name);
            const auto message = message_of<CheckpointError>([&] { save(state, folder + name); });
            EXPECT_TRUE(contains(message, "rank 0: " + folder + "/"));
            EXPECT_TRUE(contains(message, " cannot be made: Permission denied"));
          }
        });
      },
      [&](int) { return Environment{{"TEST_FOLDER", folder}, {"RANK", ""}, {"WORLD_SIZE", ""}}; });
  if (!given) {
    ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
    EXPECT_EQ(detail::list_folder(folder), std::vector<std::string>{"checkpoint"});
    expect_loads(2, folder + "/checkpoint", 5);
  }
}

TEST(FailedSave, WhatIsNoCheckpointIsNotReplaced) {
  const auto folder = temporary_folder();
  set_file_text(folder + "/thesis.txt", "years of work");
  expect_save_fails(folder, "thesis.txt");
  EXPECT_EQ(file_text(folder + "/thesis.txt"), "years of work");
  expect_save_fails(folder + "/thesis.txt", "not a folder");
}

TEST(FailedSave, OverwriteOff) {
  const auto path = saved_checkpoint();
  run_ranks(2, [&](int) {
    const auto state = make_state(samples_1d(), world_mesh(), 6);
    message_of<CheckpointError>([&] { save(state, path, {.overwrite = false}); });
  });
  expect_loads(1, path, 5);
}

TEST(FailedSave, WhatCannotBeSaved) {
  const auto folder = temporary_folder();
  const auto path = folder + "/checkpoint";
  run_ranks(2, [&](int rank) {
    const auto mesh = world_mesh();
    auto partial = state_with("p", DTensor::from_local(torch::ones({2}), mesh, {Partial{}}));
    EXPECT_TRUE(contains(message_of<CheckpointError>([&] { save(partial, path); }), "'p'"));
    auto meta = state_with(
        "m", torch::ones(
                 {2}, rank == 1 ? torch::kMeta
                                : torch::kCPU)); // on one rank only: the other hears of it
    EXPECT_TRUE(contains(message_of<CheckpointError>([&] { save(meta, path); }), "rank 1"));
    auto different = state_with("d", torch::ones({2 + rank}));
    EXPECT_TRUE(contains(
        message_of<CheckpointError>([&] { save(different, path); }), "not the same on all"));
    auto fine = state_with("x", torch::ones({2}));
    EXPECT_TRUE(contains(
        message_of<CheckpointError>([&] { save(fine, path + std::to_string(rank)); }),
        "rank 1 saves"));
  });
  EXPECT_TRUE(detail::list_folder(folder).empty());
}

TEST(TwoSavers, OneIsRefusedAndACompleteCheckpointIsLeft) {
  const auto path = temporary_folder() + "/checkpoint";
  std::atomic<int> num_saved{0};
  std::vector<std::thread> savers;
  for (const int64_t seed : {5, 6}) {
    savers.emplace_back([&, seed] {
      run_ranks(2, [&](int) {
        const auto state = make_state(samples_1d(), world_mesh(), seed);
        for (int i = 0; i < 10; ++i) {
          try {
            save(state, path);
            ++num_saved;
          } catch (const CheckpointError& error) {
            EXPECT_TRUE(contains(error.what(), " is being saved already, by "));
          }
        }
      });
    });
  }
  for (auto& saver : savers) {
    saver.join();
  }
  EXPECT_GT(num_saved, 0);
  const auto seed = std::get<int64_t>(*detail::open_catalog(path).find_value("step"));
  expect_loads(2, path, seed);
  EXPECT_TRUE(leftovers(path + "/..").empty());
}

} // namespace
} // namespace fsdp
