#include "checkpoint/publication.h"

#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <random>
#include <thread>

#include "base/check.h"
#include "base/text.h"

namespace fsdp::detail {

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kInfix = ".tmp-";
constexpr int64_t kQuietSeconds = 60;           // of a save whose rank 0 is dead
constexpr int64_t kQuietUnlockedSeconds = 3600; // of one that has no lock (yet)

std::string new_id() {
  std::random_device random;
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  char text[40];
  std::snprintf(text, sizeof(text), "%016llx%08x", static_cast<unsigned long long>(now), random());
  return text;
}

/// Calls `ready` until it is true, ever more slowly; false after `timeout`.
bool poll(std::chrono::milliseconds timeout, const std::function<bool()>& ready) {
  const auto deadline = Clock::now() + timeout;
  auto pause = std::chrono::microseconds(200);
  while (!ready()) {
    if (Clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 3 / 2, std::chrono::microseconds(100'000));
  }
  return true;
}

bool starts_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

/// A folder that goes with all that is in it when it is replaced must hold nothing
/// but a checkpoint.
void check_replaceable(const Publication& publication) {
  const auto& target = publication.target;
  if (!path_exists(target)) {
    return;
  }
  FSDP_CHECK_AS(
      CheckpointError, is_folder(target), target.string(), " is there and is not a folder");
  for (const auto& name : list_folder(target)) {
    FSDP_CHECK_AS(
        CheckpointError, publication.overwrite, target.string(),
        " is there already, and overwrite is off");
    FSDP_CHECK_AS(
        CheckpointError,
        ends_with(name, ".safetensors") || name == "manifest.json" ||
            name == "model.safetensors.index.json",
        target.string(), " holds '", name,
        "', which is not of a checkpoint: it would be lost; save to another folder");
  }
}

void check_failed(const Publication& publication) {
  const auto folder = publication.folder();
  if (path_exists(folder / "failed")) {
    FSDP_THROW(CheckpointError, read_text(folder / "failed"));
  }
  FSDP_CHECK_AS(
      CheckpointError, path_exists(folder), "rank ", publication.rank, ": ", folder.string(),
      " was removed while ", publication.target.string(), " was being saved");
}

/// Rank 0: what each rank published.
std::vector<std::string> wait_for_ranks(const Publication& publication) {
  const auto folder = publication.folder();
  std::vector<int> missing;
  const bool all = poll(publication.timeout, [&] {
    check_failed(publication);
    const auto names = list_folder(folder);
    missing.clear();
    for (int rank = 0; rank < publication.world_size; ++rank) {
      if (!std::binary_search(names.begin(), names.end(), rank_name(rank) + ".json")) {
        missing.push_back(rank);
      }
    }
    return missing.empty();
  });
  FSDP_CHECK_AS(
      CheckpointError, all, "rank 0: no word of ranks ", join(missing), " in ", folder.string(),
      " after ", publication.timeout.count(),
      " ms: they are dead or slow, or do not see this "
      "folder");
  std::vector<std::string> texts;
  for (int rank = 0; rank < publication.world_size; ++rank) {
    texts.push_back(read_text(folder / (rank_name(rank) + ".json")));
  }
  return texts;
}

/// The others: until rank 0 is done. They outwait it, who can say who is missing.
void wait_for_rank0(const Publication& publication) {
  const auto folder = publication.folder();
  const bool done = poll(2 * publication.timeout + std::chrono::seconds(1), [&] {
    const bool found = path_exists(folder / "done");
    if (!found) {
      check_failed(publication);
    }
    return found;
  });
  FSDP_CHECK_AS(
      CheckpointError, done, "rank ", publication.rank, ": rank 0 has not completed ",
      publication.target.string(), " in time");
}

/// 0, or the error number.
int exchange(const Path& first, const Path& second) {
  if (before_change) {
    before_change("rename", second);
  }
  const bool done =
      renameat2(AT_FDCWD, first.c_str(), AT_FDCWD, second.c_str(), RENAME_EXCHANGE) == 0;
  return done ? 0 : errno;
}

void put_in_place(const Publication& publication) {
  const auto& target = publication.target;
  const auto data = publication.data();
  sync_folder(data);
  // Another saver may come between any two calls, so more than once.
  constexpr int kTries = 100;
  for (int i = 0;; ++i) {
    check_replaceable(publication);
    if (before_change) {
      before_change("rename", target);
    }
    if (rename(data.c_str(), target.c_str()) == 0) {
      break;
    }
    int error = errno;
    if (error == ENOTEMPTY || error == EEXIST) {
      error = exchange(data, target);
      if (error == 0) {
        break;
      }
      if (error == EINVAL || error == ENOSYS || error == ENOTSUP) {
        const auto old = publication.folder() / c10::str("old", i);
        rename_path(target, old);
        if (rename(data.c_str(), target.c_str()) == 0) {
          break;
        }
        error = errno;
        // Where another saver's is there now, that one stays, until ours comes.
        if (rename(old.c_str(), target.c_str()) == 0 || errno != ENOTEMPTY) {
          throw_system_error(("put in place as " + target.string()).c_str(), data, error);
        }
        continue;
      }
    }
    if (error != ENOENT || i == kTries || !path_exists(data)) {
      throw_system_error(("put in place as " + target.string()).c_str(), data, error);
    }
  }
  sync_folder(target.parent_path());
}

/// For what follows success or failure, and must not hide it: the folder may be
/// gone, or the disk full.
void quietly(const std::function<void()>& step) {
  try {
    step();
  } catch (const CheckpointError&) {
  }
}

/// The last to leave removes the folder, with what was replaced.
void leave(const Publication& publication) {
  const auto folder = publication.folder();
  write_text(folder / (rank_name(publication.rank) + ".left"), "");
  const auto names = list_folder(folder);
  const auto num_left = std::count_if(
      names.begin(), names.end(), [](const auto& name) { return ends_with(name, ".left"); });
  if (num_left == publication.world_size) {
    remove_tree(folder);
  }
}

} // namespace

std::string rank_name(int rank) {
  char text[32];
  std::snprintf(text, sizeof(text), "rank_%05d", rank);
  return text;
}

Path clean_path(const Path& path) {
  const auto clean = path.lexically_normal();
  const auto result = clean.has_filename() ? clean : clean.parent_path();
  FSDP_CHECK_AS(
      CheckpointError,
      result.has_filename() && result.filename() != "." && result.filename() != "..", "'",
      path.string(), "' is not a name for a checkpoint");
  return result;
}

Path Publication::folder() const {
  return target.string() + kInfix + id;
}

void remove_leftovers(const Path& parent, const std::string& name_begin, int64_t now) {
  for (const auto& name : list_folder(parent.empty() ? Path(".") : parent)) {
    if (!starts_with(name, name_begin) || name.find(kInfix) == std::string::npos) {
      continue;
    }
    const auto folder = parent / name;
    const bool locked = path_exists(folder / "lock");
    if (now - changed_at(folder) < (locked ? kQuietSeconds : kQuietUnlockedSeconds)) {
      continue;
    }
    try {
      if (locked && !File::open(folder / "lock").try_lock()) {
        continue;
      }
      remove_tree(folder);
    } catch (const CheckpointError&) { // another saver was faster
    }
  }
}

void prepare(Publication& publication) {
  publication.id = new_id();
  const auto parent = publication.target.parent_path();
  check_replaceable(publication);
  make_folders(parent);
  make_folders(publication.folder());
  publication.lock = std::make_shared<File>(File::create(publication.folder() / "lock"));
  publication.lock->try_lock(); // where locks are not to be had, time has to do
  make_folders(publication.data());
  remove_leftovers(
      parent, publication.target.filename().string() + kInfix, changed_at(publication.folder()));
}

void give_up(const Publication& publication, const std::string& reason) {
  quietly([&] { // the disk may be full
    for (const auto& name : list_folder(publication.data())) {
      if (starts_with(name, rank_name(publication.rank)) || publication.rank == 0) {
        remove_tree(publication.data() / name);
      }
    }
  });
  quietly([&] {
    if (path_exists(publication.folder()) && !path_exists(publication.folder() / "failed")) {
      write_text(publication.folder() / "failed", reason);
    }
  });
  quietly([&] { leave(publication); });
}

void publish(const Publication& publication, const PublicationSteps& steps) {
  try {
    FSDP_CHECK_AS(
        CheckpointError, poll(publication.timeout, [&] { return is_folder(publication.data()); }),
        publication.data().string(),
        ", which rank 0 made, is not to be seen: is this folder "
        "shared between the ranks?");
    const auto text = steps.write();
    write_text(publication.folder() / (rank_name(publication.rank) + ".json"), text);
    if (publication.rank == 0) {
      steps.finish(wait_for_ranks(publication));
      put_in_place(publication);
      if (steps.after) {
        steps.after();
      }
      write_text(publication.folder() / "done", "");
    } else {
      wait_for_rank0(publication);
    }
  } catch (...) {
    auto reason = current_exception_text();
    // Another rank's reason says which rank already.
    if (!starts_with(reason, "rank ")) {
      reason = c10::str("rank ", publication.rank, ": ", reason);
    }
    give_up(publication, reason);
    FSDP_THROW(CheckpointError, reason);
  }
  quietly([&] { leave(publication); });
}

} // namespace fsdp::detail
