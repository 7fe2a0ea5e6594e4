#include "checkpoint/publication.h"

#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <random>
#include <thread>

#include "base/check.h"
#include "base/text.h"

namespace fsdp::detail {

bool has_exchange = true;

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kInfix = ".tmp-";
constexpr size_t kReserve = 4096; // bytes for the reason of a failure
constexpr int64_t kQuietSeconds = 60;           // of a save whose rank 0 is dead
constexpr int64_t kQuietUnlockedSeconds = 3600; // of one that has no lock (yet)

std::string new_id() {
  std::random_device random;
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  char text[40];
  std::snprintf(text, sizeof(text), "%016llx%08x", static_cast<unsigned long long>(now), random());
  return text;
}

/// Whether `name` is one that new_id or kRemovedSuffix makes; others are the user's.
bool is_leftover(const std::string& name) {
  const auto infix = name.rfind(kInfix);
  if (infix == std::string::npos) {
    return false;
  }
  const auto id = name.substr(infix + std::string_view(kInfix).size());
  constexpr size_t kIdLength = 24;
  return name.substr(infix) == kRemovedSuffix ||
         (id.size() == kIdLength && id.find_first_not_of("0123456789abcdef") == std::string::npos);
}

/// The publication's timeout, or a year: a clock cannot add forever.
std::chrono::milliseconds timeout_of(const Publication& publication) {
  return std::min<std::chrono::milliseconds>(publication.timeout, std::chrono::hours(24 * 365));
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

/// A folder that goes with all that is in it when it is replaced must hold nothing
/// but a checkpoint. `place` is where what is or was TARGET lies.
void check_replaceable(const Publication& publication, const Path& place) {
  const auto& target = publication.target;
  if (!path_exists(place)) {
    return;
  }
  FSDP_CHECK_AS(
      CheckpointError, !is_link(place), target.string(),
      " is a symbolic link: save to where it leads");
  FSDP_CHECK_AS(
      CheckpointError, is_folder(place), target.string(), " is there and is not a folder");
  for (const auto& name : list_folder(place)) {
    FSDP_CHECK_AS(
        CheckpointError, publication.overwrite, target.string(),
        " is there already, and overwrite is off");
    FSDP_CHECK_AS(
        CheckpointError,
        name.ends_with(".safetensors") || name == "manifest.json" ||
            name == "model.safetensors.index.json",
        target.string(), " holds '", name,
        "', which is not of a checkpoint: it would be lost; save to another folder");
  }
}

/// For what follows success or failure, and must not hide it: the folder may be
/// gone, or the disk full. False where it fails.
bool quietly(const std::function<void()>& step) {
  try {
    step();
    return true;
  } catch (const CheckpointError&) {
    return false;
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

/// Tells of ranks that have died, so that nobody waits for them until the timeout.
class DeathWatch {
 public:
  explicit DeathWatch(const Publication& publication) : publication_(publication) {}

  /// Throws where some of `ranks`, which are waited for, have been gone for a while: what
  /// they wrote last may be seen late on network file systems.
  void check(std::vector<int> ranks) {
    const auto now = Clock::now();
    if (!publication_.is_gone || now < next_) {
      return;
    }
    next_ = now + kPause;
    std::erase_if(ranks, [&](int rank) { return !publication_.is_gone(rank); });
    if (ranks.empty()) {
      all_well_ = now;
    }
    FSDP_CHECK_AS(
        CheckpointError, now - all_well_ <= publication_.patience, "rank ", publication_.rank,
        ": rank ", join(ranks), ranks.size() == 1 ? " is" : " are", " gone, and ",
        publication_.target.string(), " is not complete");
  }

 private:
  static constexpr auto kPause = std::chrono::seconds(1);

  const Publication& publication_;
  Clock::time_point all_well_ = Clock::now();
  Clock::time_point next_ = all_well_ + kPause; // most saves are over by then
};

/// The others: until they see what rank 0 has made, which takes some network file
/// systems a minute.
void wait_for_folder(const Publication& publication) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::minutes(2);
  const bool seen = poll(std::min(timeout_of(publication), kLongest), [&] {
    if (path_exists(publication.folder())) {
      check_failed(publication);
    }
    return is_folder(publication.data());
  });
  FSDP_CHECK_AS(
      CheckpointError, seen, publication.data().string(),
      ", which rank 0 made, is not to be seen: is this folder shared between the ranks?");
}

/// Rank 0: what each rank published.
std::vector<std::string> wait_for_ranks(const Publication& publication) {
  const auto folder = publication.folder();
  std::vector<int> missing;
  DeathWatch watch(publication);
  const bool all = poll(timeout_of(publication), [&] {
    check_failed(publication);
    const auto names = list_folder(folder);
    missing.clear();
    for (int rank = 0; rank < publication.world_size; ++rank) {
      if (!std::binary_search(names.begin(), names.end(), rank_name(rank) + ".json")) {
        missing.push_back(rank);
      }
    }
    watch.check(missing);
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
  DeathWatch watch(publication);
  const bool done = poll(2 * timeout_of(publication) + std::chrono::seconds(1), [&] {
    const bool found = path_exists(folder / "done");
    if (!found) {
      check_failed(publication);
      watch.check({0});
    }
    return found;
  });
  FSDP_CHECK_AS(
      CheckpointError, done, "rank ", publication.rank, ": rank 0 has not completed ",
      publication.target.string(), " in time");
}

/// renameat2; 0, or the error number.
int try_rename(const Path& from, const Path& to, unsigned flags) {
  if (before_change) {
    before_change("rename", to);
  }
  return renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0 ? 0 : errno;
}

bool is_occupied(int error) {
  return error == ENOTEMPTY || error == EEXIST;
}

/// What was TARGET lies at `place` now. Where it must not be replaced (it has changed
/// since TARGET was looked at), `undo` puts it back, or returns an error number.
void check_replaced(
    const Publication& publication, const Path& place, const std::function<int()>& undo) {
  try {
    check_replaceable(publication, place);
  } catch (const CheckpointError&) {
    if (undo() != 0) { // then at least out of what is going to be removed
      rename_path(place, publication.target.string() + ".kept-" + publication.id);
    }
    throw;
  }
}

/// Puts data/ where TARGET is, by one call or, on file systems that do not have it,
/// by two; 0, or the error number.
int replace(const Publication& publication, const Path& old) {
  const auto& target = publication.target;
  const auto data = publication.data();
  const auto exchange = [&] { return try_rename(data, target, RENAME_EXCHANGE); };
  int error = has_exchange ? exchange() : EINVAL;
  if (error == 0) {
    check_replaced(publication, data, exchange);
  }
  if (error != EINVAL && error != ENOSYS && error != ENOTSUP) {
    return error;
  }
  error = try_rename(target, old, 0);
  if (error != 0) {
    return error;
  }
  const auto put_back = [&] { return try_rename(old, target, 0); };
  check_replaced(publication, old, put_back);
  error = try_rename(data, target, 0);
  if (error != 0 && !is_occupied(error)) {
    put_back(); // where it fails, remove_publication tries again
  }
  return error;
}

void put_in_place(const Publication& publication) {
  const auto& target = publication.target;
  const auto data = publication.data();
  sync_folder(data);
  // Another saver may come between any two calls, so more than once.
  constexpr int kTries = 100;
  for (int i = 0;; ++i) {
    check_replaceable(publication, target);
    // Replaces no more than an empty folder.
    int error = try_rename(data, target, 0);
    if (is_occupied(error) && publication.overwrite) {
      error = replace(publication, publication.folder() / c10::str("old", i));
    }
    if (error == 0) {
      break;
    }
    if ((error != ENOENT && !is_occupied(error)) || i == kTries || !path_exists(data)) {
      throw_system_error(("put in place as " + target.string()).c_str(), data, error);
    }
  }
  sync_folder(target.parent_path());
}

/// Removes TARGET.tmp-ID. Where TARGET is missing, what had been taken away from
/// there goes back first: it may be the only checkpoint.
void remove_publication(const Path& folder, const Path& target) {
  std::string newest;
  for (const auto& name : list_folder(folder)) {
    const bool is_old = name.size() > 3 && name.starts_with("old") &&
                        name.find_first_not_of("0123456789", 3) == std::string::npos;
    if (is_old && std::pair(name.size(), name) > std::pair(newest.size(), newest)) {
      newest = name;
    }
  }
  // Not where the new one has been there: data/ is gone then. It is also the first to go.
  if (!newest.empty() && path_exists(folder / "data") && !path_exists(target)) {
    const int error = try_rename(folder / newest, target, 0);
    if (error != 0 && !is_occupied(error)) {
      throw_system_error(("put back as " + target.string()).c_str(), folder / newest, error);
    }
    sync_folder(target.parent_path());
  }
  remove_tree(folder);
}

/// The last to leave removes the folder, with what was replaced.
void leave(const Publication& publication) {
  const auto folder = publication.folder();
  int64_t num_left = 1;
  if (publication.world_size > 1) { // alone it needs no room on the disk
    write_text(folder / (rank_name(publication.rank) + ".left"), "");
    const auto names = list_folder(folder);
    num_left = std::count_if(
        names.begin(), names.end(), [](const auto& name) { return name.ends_with(".left"); });
  }
  if (num_left == publication.world_size) {
    remove_publication(folder, publication.target);
  }
}

/// What dead saves have left, by `now` of this file system.
void tidy_up(const Publication& publication, int64_t now) {
  const auto& target = publication.target;
  const auto own = target.filename().string() + kInfix;
  remove_leftovers(
      target.parent_path(), publication.leftovers.empty() ? own : publication.leftovers, now);
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
    if (!name.starts_with(name_begin) || !is_leftover(name)) {
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
      remove_publication(folder, parent / name.substr(0, name.rfind(kInfix)));
    } catch (const CheckpointError&) { // another saver was faster
    }
  }
}

void prepare(Publication& publication) {
  publication.id = new_id();
  check_replaceable(publication, publication.target);
  make_folders(publication.target.parent_path());
  for (bool again = true;; again = false) {
    try {
      make_folder(publication.folder());
      publication.lock = std::make_shared<File>(File::create(publication.folder() / "lock"));
      publication.lock->try_lock(); // where locks are not to be had, time has to do
      write_text(publication.folder() / "reserve", std::string(kReserve, ' '));
      make_folder(publication.data());
      return;
    } catch (const CheckpointError&) {
      quietly([&] { remove_tree(publication.folder()); });
      if (!again) {
        throw;
      }
      quietly([&] { tidy_up(publication, std::time(nullptr)); }); // they may fill the disk
    }
  }
}

void give_up(const Publication& publication, const std::string& reason) {
  const auto folder = publication.folder();
  quietly([&] { // the disk may be full
    for (const auto& name : list_folder(publication.data())) {
      if (name.starts_with(rank_name(publication.rank)) || publication.rank == 0) {
        remove_tree(publication.data() / name);
      }
    }
  });
  // Only one rank can rename the reserve; the others have nothing to add to its reason.
  const auto mine = folder / (rank_name(publication.rank) + ".reason");
  const bool told = quietly([&] {
    if (try_rename(folder / "reserve", mine, 0) == 0) {
      const auto file = File::create(mine);
      const auto text = reason.substr(0, kReserve);
      file.write(0, text.data(), static_cast<int64_t>(text.size()));
      file.resize(static_cast<int64_t>(text.size()));
      rename_path(mine, folder / "failed");
    }
  });
  if (told) {
    quietly([&] { leave(publication); });
  } else { // that it is gone tells them too; they may be making files there
    poll(std::chrono::seconds(2), [&] {
      return quietly([&] { remove_publication(folder, publication.target); });
    });
  }
}

void publish(const Publication& publication, const PublicationSteps& steps) {
  try {
    if (publication.rank == 0) { // not in `prepare`: training waits for that
      quietly([&] { tidy_up(publication, changed_at(publication.folder())); });
      check_failed(publication);
    } else {
      wait_for_folder(publication);
    }
    const auto text = steps.write();
    write_text(publication.folder() / (rank_name(publication.rank) + ".json"), text);
    if (publication.rank == 0) {
      steps.finish(wait_for_ranks(publication));
      // Nothing that needs room on the disk comes after it is in place.
      write_text(publication.folder() / "placing", "");
      put_in_place(publication);
      if (steps.after) {
        steps.after();
      }
      rename_path(publication.folder() / "placing", publication.folder() / "done");
    } else {
      wait_for_rank0(publication);
    }
  } catch (...) {
    auto reason = current_exception_text();
    // Another rank's reason says which rank already.
    if (!reason.starts_with("rank ")) {
      reason = c10::str("rank ", publication.rank, ": ", reason);
    }
    give_up(publication, reason);
    FSDP_THROW(CheckpointError, reason);
  }
  quietly([&] { leave(publication); });
}

} // namespace fsdp::detail
