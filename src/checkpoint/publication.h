#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/files.h"
#include "checkpoint/save_reports.h"

namespace fsdp::detail {

// Note [How a checkpoint appears]
//
// While TARGET is being saved, TARGET.fsdp-saving lies next to it, with
//   lock                held by rank 0 as long as it lives; says which process that is
//   ID/                 of this save alone: ranks of a dead save write to a folder of their own
//   ID/data/            what becomes TARGET
//   ID/rank_00003.json  what rank 3 has written
//   ID/old/             what was TARGET, for a moment, if the file system cannot exchange two
//                       folders
// Every rank writes and syncs its files in data/ and reports that to rank 0, through the store of
// their world. Rank 0 completes data/ and moves it to its final name by one system call: it renames
// data/ if there is no TARGET, else it exchanges the two, and removes the old one afterwards. So at
// any moment TARGET is a complete checkpoint, the old one or the new one, whoever is killed. Only a
// file system that cannot exchange (some network ones) has a moment without TARGET. The old one is
// in old/ then.
//
// The lock refuses a second saver of TARGET. If the lock is free, whoever held it is dead: the next
// save puts old/ back if TARGET is missing, and removes the rest. A series also removes what dead
// saves of other checkpoints left, if nothing has changed there for a minute: file systems exist
// where one machine does not see another's locks. A run that is resumed need not wait for this
// minute if the lock is from a process of its own machine.

/// One save, as one rank sees it.
struct Publication {
  Path target;
  bool overwrite = true;
  SaveRanks ranks = {};
  /// Folders that dead saves left are removed, too, if their names begin with this. If it is empty,
  /// none are.
  std::string leftovers = {};
  std::string id = {};                  // of this save alone
  std::shared_ptr<File> lock = nullptr; // rank 0
  bool is_exclusive = false;            // rank 0: the file system has locks

  Path folder() const; // TARGET.fsdp-saving
  Path work() const {
    return folder() / id;
  }
  Path data() const {
    return work() / "data";
  }
};

/// The end of the name of a checkpoint that is being removed.
inline constexpr const char* kRemovingSuffix = ".fsdp-removing";

/// Renames the folder to `aside`, then removes it: nobody finds half of it.
void remove_at_once(const Path& folder, const Path& aside);

/// Returns the path without dots and without a slash at its end.
Path clean_path(const Path& path);

/// Makes the folder and the id, on rank 0. Throws if somebody else is saving TARGET, or if TARGET
/// must not be replaced.
void prepare(Publication& publication);

/// The steps of the ranks in a save.
struct PublicationSteps {
  /// Writes and syncs this rank's files in data/. Returns a description of them for rank 0.
  std::function<std::string()> write;
  /// Called on rank 0 when all ranks have written. Writes the file that makes theirs a checkpoint.
  std::function<void(const std::vector<std::string>& texts)> finish;
  /// Called on rank 0 when TARGET is the new checkpoint. May be empty.
  std::function<void()> after = {};
};

/// Does this rank's part of a save. Throws CheckpointError on all ranks if one of them fails.
void publish(const Publication& publication, const PublicationSteps& steps);

/// Rank 0: removes the folder of a save of which the other ranks do not know yet.
void discard(const Publication& publication);

/// Ends a save that has failed on this rank, or did not begin: tells the other ranks why. Returns
/// the reason of the rank that failed first.
std::string give_up(const Publication& publication, const std::string& reason);

/// Removes what dead saves have left in `parent` under names that begin so, if nothing has changed
/// there for a minute before `now`, a time of that file system. Without `now`, does not wait for
/// this minute, and removes only saves of this machine whose lock is free.
void remove_leftovers(
    const Path& parent, const std::string& name_begin, std::optional<int64_t> now = {});

/// Tests set this to false. A save then does what it does on a file system that cannot exchange two
/// folders.
extern bool has_exchange;

/// "rank_00003"
std::string rank_name(int rank);

} // namespace fsdp::detail
