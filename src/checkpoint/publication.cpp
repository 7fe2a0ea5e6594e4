#include "checkpoint/publication.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <random>
#include <thread>

#include "base/check.h"
#include "checkpoint/catalog.h"
#include "checkpoint/manifest.h"

namespace fsdp::detail {

bool has_exchange = true;

namespace {

constexpr const char* kSavingSuffix = ".fsdp-saving";
constexpr int64_t kQuietSeconds = 60;

std::string new_id() {
  std::random_device random;
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  char text[40];
  std::snprintf(text, sizeof(text), "%016llx%08x", static_cast<unsigned long long>(now), random());
  return text;
}

/// Runs a step that follows a success or a failure. Ignores its errors, because they must not hide
/// that outcome: the disk may be full.
void quietly(const std::function<void()>& step) {
  try {
    step();
  } catch (const CheckpointError&) {
  }
}

// ------------------------------------------------------------ TARGET

/// Throws unless the folder, which is or was TARGET, may be replaced. It may be if it holds nothing
/// but a checkpoint.
void check_replaceable(const Publication& publication, const Path& folder) {
  const auto& target = publication.target;
  if (!path_exists(folder)) {
    return;
  }
  FSDP_CHECK_AS(
      CheckpointError, !is_link(folder), target.string(),
      " is a symbolic link: save to where it leads");
  FSDP_CHECK_AS(
      CheckpointError, is_folder(folder), target.string(), " is there and is not a folder");
  for (const auto& name : list_folder(folder)) {
    FSDP_CHECK_AS(
        CheckpointError, publication.overwrite, target.string(),
        " exists already, and overwrite is off");
    FSDP_CHECK_AS(
        CheckpointError,
        name.ends_with(".safetensors") || name == kManifestName || name == kHfIndexName,
        target.string(), " holds '", name,
        "', which is not of a checkpoint: it would be lost; save to another folder");
  }
}

/// Calls renameat2. Returns 0 or the error number.
int try_rename(const Path& from, const Path& to, unsigned flags = 0) {
  if (before_change) {
    before_change("rename", to);
  }
  return renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0 ? 0 : errno;
}

/// Moves data/ to TARGET. Sets `replaced` to the path of the old TARGET. Returns 0 or the error
/// number.
int exchange(const Publication& publication, Path& replaced) {
  const auto& target = publication.target;
  const auto data = publication.data();
  const int error = has_exchange ? try_rename(data, target, RENAME_EXCHANGE) : EINVAL;
  if (error != EINVAL && error != ENOSYS && error != ENOTSUP) {
    replaced = data;
    return error;
  }
  replaced = publication.work() / "old";
  if (const int moved = try_rename(target, replaced); moved != 0) {
    return moved;
  }
  return try_rename(data, target);
}

void put_in_place(const Publication& publication) {
  const auto& target = publication.target;
  const auto data = publication.data();
  sync_folder(data);
  // A rename replaces nothing but an empty folder.
  int error = try_rename(data, target);
  if (error == ENOTEMPTY || error == EEXIST) {
    check_replaceable(publication, target);
    Path replaced;
    error = exchange(publication, replaced);
    try {
      check_replaceable(publication, error == 0 ? replaced : target);
    } catch (const CheckpointError&) { // somebody wrote into TARGET in this very moment: undo
      const int undone = replaced == data ? try_rename(data, target, RENAME_EXCHANGE)
                                          : try_rename(target, data); // old/ goes back, see below
      if (undone != 0) {
        rename_path(replaced, target.string() + ".kept-" + publication.id); // at least not removed
      }
      throw;
    }
  }
  if (error != 0) {
    throw_system_error(("put in place as " + target.string()).c_str(), data, error);
  }
  sync_folder(target.parent_path());
}

// ------------------------------------------------------------ TARGET.fsdp-saving

/// Puts the old/ of a save back if TARGET is missing or empty: it may be the only checkpoint.
void put_old_back(const Path& work, const Path& target) {
  // data/ is missing if the new checkpoint has been in place.
  if (path_exists(work / "old") && path_exists(work / "data")) {
    const int error = try_rename(work / "old", target);
    if (error != 0 && error != ENOTEMPTY && error != EEXIST) {
      throw_system_error(("put back as " + target.string()).c_str(), work / "old", error);
    }
    sync_folder(target.parent_path());
  }
}

/// Returns the folders of saves in TARGET.fsdp-saving, except for the one of that name.
std::vector<Path> saves_in(const Path& folder, const std::string& except = "") {
  std::vector<Path> saves;
  for (const auto& name : list_folder(folder)) {
    if (name != "lock" && name != except) {
      saves.push_back(folder / name);
    }
  }
  return saves;
}

std::string host_name() {
  std::array<char, 256> host{};
  (void)gethostname(host.data(), host.size() - 1);
  return host.data();
}

std::string this_process() {
  char since[32];
  const auto now = std::time(nullptr);
  std::tm parts{};
  (void)std::strftime(since, sizeof(since), "%F %T UTC", gmtime_r(&now, &parts));
  return c10::str("process ", getpid(), " on ", host_name(), " since ", since);
}

/// Locks the folder for this save. Makes it if it is not there.
void lock_folder(Publication& publication) {
  const auto folder = publication.folder();
  constexpr int kTries = 10; // a save that ends removes the folder in between
  for (int i = 0;; ++i) {
    try {
      make_folder(folder);
      auto lock = std::make_shared<File>(File::create(folder / "lock"));
      const bool locked = lock->try_lock();
      // Another error than EWOULDBLOCK: this file system has no locks.
      if (!locked && errno == EWOULDBLOCK) {
        std::string who = "another process";
        quietly([&] { who = read_text(folder / "lock"); });
        who = who.empty() ? "a process that has just begun" : who;
        FSDP_THROW(
            CheckpointError, publication.target.string(), " is being saved already, by ", who,
            "; wait until that is done or save to another folder (if that process is dead, remove ",
            folder.string(), ")");
      }
      if (File::open(folder / "lock").version() == lock->version()) {
        const auto text = this_process();
        quietly([&] {
          lock->resize(0);
          lock->write(0, text.data(), static_cast<int64_t>(text.size()));
        });
        publication.lock = std::move(lock);
        publication.is_exclusive = locked;
        return;
      }
    } catch (const CheckpointError&) {
      if (path_exists(folder / "lock") || i == kTries) {
        throw;
      }
    }
  }
}

/// The other ranks wait until they see what rank 0 has made. Some network file systems take a
/// minute.
void wait_for_folder(const Publication& publication, SaveReports& reports) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::minutes(2);
  const auto deadline =
      std::chrono::steady_clock::now() + std::min(publication.ranks.timeout, kLongest);
  while (!is_folder(publication.data())) {
    reports.check_failed(); // then rank 0 has removed it
    FSDP_CHECK_AS(
        CheckpointError, std::chrono::steady_clock::now() < deadline, publication.data().string(),
        ", which rank 0 made, is not to be seen: is this folder shared between the ranks?");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

SaveReports reports_of(const Publication& publication) {
  return {publication.ranks, publication.id, publication.target.string()};
}

std::vector<std::string> texts_of_ranks(const Publication& publication) {
  std::vector<std::string> texts;
  for (int rank = 0; rank < publication.ranks.size; ++rank) {
    texts.push_back(read_text(publication.work() / (rank_name(rank) + ".json")));
  }
  return texts;
}

/// Removes what dead saves have left of TARGET, unless another saver holds its lock, and of the
/// other checkpoints of its series. Without locks, removes only what has not changed for a minute.
void remove_all_dead(const Publication& publication) {
  const auto now = changed_at(publication.folder());
  for (const auto& work : saves_in(publication.folder(), publication.id)) {
    const bool is_dead = publication.is_exclusive || now - changed_at(work) >= kQuietSeconds;
    if (publication.lock && is_dead) {
      put_old_back(work, publication.target);
      remove_tree(work);
    }
  }
  if (!publication.leftovers.empty()) {
    remove_leftovers(publication.target.parent_path(), publication.leftovers, now);
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

void remove_at_once(const Path& folder, const Path& aside) {
  remove_tree(aside);
  rename_path(folder, aside);
  remove_tree(aside);
}

Path Publication::folder() const {
  return target.string() + kSavingSuffix;
}

void remove_leftovers(
    const Path& parent, const std::string& name_begin, std::optional<int64_t> now) {
  for (const auto& name : list_folder(parent.empty() ? Path(".") : parent)) {
    const bool saving = name.ends_with(kSavingSuffix);
    const auto folder = parent / name;
    if (!name.starts_with(name_begin) || !(saving || name.ends_with(kRemovingSuffix)) ||
        (now && *now - changed_at(folder) < kQuietSeconds)) {
      continue;
    }
    quietly([&] { // another saver may be faster
      std::optional<File> lock;
      if (path_exists(folder / "lock")) {
        lock = File::create(folder / "lock");
      }
      if (lock && !lock->try_lock()) {
        return;
      }
      const auto here = " on " + host_name() + " since ";
      if (!now && saving && !(lock && read_text(folder / "lock").find(here) != std::string::npos)) {
        return;
      }
      const auto target = parent / name.substr(0, name.rfind('.'));
      for (const auto& work : saving ? saves_in(folder) : std::vector<Path>()) {
        put_old_back(work, target);
      }
      remove_tree(folder);
    });
  }
}

void prepare(Publication& publication) {
  publication.id = new_id();
  check_replaceable(publication, publication.target);
  make_folders(publication.target.parent_path());
  for (bool again = true;; again = false) {
    try {
      lock_folder(publication);
      for (const auto& work : saves_in(publication.folder())) {
        put_old_back(work, publication.target);
      }
      make_folder(publication.work());
      make_folder(publication.data());
      return;
    } catch (const CheckpointError&) {
      if (!again) {
        discard(publication);
        publication.lock.reset();
        throw;
      }
      quietly([&] { remove_all_dead(publication); }); // they may fill the disk
    }
  }
}

void discard(const Publication& publication) {
  if (!publication.lock) {
    return; // the folder is another saver's
  }
  quietly([&] {
    put_old_back(publication.work(), publication.target);
    if (publication.is_exclusive) {
      remove_at_once(publication.folder(), publication.target.string() + kRemovingSuffix);
    } else {
      remove_tree(publication.work());
    }
  });
}

std::string give_up(const Publication& publication, const std::string& reason) {
  const auto first = reports_of(publication).failed(reason);
  if (publication.ranks.rank == 0) {
    discard(publication);
  }
  return first;
}

void publish(const Publication& publication, const PublicationSteps& steps) {
  auto reports = reports_of(publication);
  const int rank = publication.ranks.rank;
  try {
    if (rank != 0) {
      wait_for_folder(publication, reports);
    } else { // `prepare` does not do this, because training waits for it
      quietly([&] { remove_all_dead(publication); });
    }
    write_text(publication.work() / (rank_name(rank) + ".json"), steps.write());
    reports.complete();
    if (rank == 0) {
      reports.wait_for_ranks();
      steps.finish(texts_of_ranks(publication));
      put_in_place(publication);
      if (steps.after) {
        steps.after();
      }
      reports.saved();
    } else {
      reports.wait_for_rank_0();
    }
  } catch (...) {
    auto reason = current_exception_text();
    // The reason of another rank names that rank already.
    if (!reason.starts_with("rank ")) {
      reason = c10::str("rank ", rank, ": ", reason);
    }
    FSDP_THROW(CheckpointError, give_up(publication, reason));
  }
  if (rank == 0) {
    discard(publication); // this also removes the old checkpoint
  }
}

} // namespace fsdp::detail
