#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/files.h"

namespace fsdp::detail {

// Note [How a checkpoint appears]
//
// Next to TARGET lies TARGET.tmp-ID while it is being saved, with
//   lock             held by rank 0 as long as it lives
//   data/            what becomes TARGET
//   rank_00003.json  rank 3 has written and synced its files; what is in them
//   reserve          blanks: room on the disk for the reason of a failure
//   failed           a rank has failed, and why: everybody gives up (the reserve, renamed)
//   placing          data/ is complete, and about to be put in place
//   done             it is in place
//   rank_00003.left  rank 3 needs nothing here any more; the last removes it all
// Rank 0 waits for all ranks' files, completes data/ and puts it in place in one
// system call: by renaming where there is no TARGET, else by exchanging the two,
// after which the old one is removed. So at any moment TARGET is a complete
// checkpoint, the old one or the new one, whoever is killed. Only where a file
// system cannot exchange (some network ones) there is a moment without: the old
// one is then TARGET.tmp-ID/old0, beside data/, and goes back before these are removed.
//
// The ranks communicate by these files alone, so that a save may go on in a thread
// of its own while the ranks' collectives are about something else.
//
// What a dead save left is removed by rank 0 of a later one: when the lock is free
// and nothing has changed for a minute, by the file system's clock. Two savers at
// once do not touch each other's; the last to finish stays.

/// One save, as one rank sees it.
struct Publication {
  Path target;
  std::string id;
  int rank = 0;
  int world_size = 1;
  bool overwrite = true;
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  std::shared_ptr<File> lock = nullptr; // rank 0
  /// Whether a rank has died: it is waited for no longer than so.
  std::function<bool(int rank)> is_gone = {};
  std::chrono::milliseconds patience = std::chrono::minutes(1);
  /// What dead saves left under names that begin so is removed; empty: of TARGET's.
  std::string leftovers = {};

  Path folder() const;
  Path data() const {
    return folder() / "data";
  }
};

/// Behind the name of a checkpoint that is being removed.
inline constexpr const char* kRemovedSuffix = ".tmp-removed";

/// Without a trailing slash and dots.
Path clean_path(const Path& path);

/// Makes the folder on rank 0, with a new id; the others get to know it from there.
/// Throws where `target` is something that must not be replaced.
void prepare(Publication& publication);

/// What the ranks do.
struct PublicationSteps {
  /// Writes and syncs this rank's files in data/; returns what the others should know.
  std::function<std::string()> write;
  /// Rank 0: writes what makes them a checkpoint.
  std::function<void(const std::vector<std::string>& texts)> finish;
  /// Rank 0, when it is in place; may be empty.
  std::function<void()> after = {};
};

/// All of a save on this rank. Throws CheckpointError on all ranks if it does on one.
void publish(const Publication& publication, const PublicationSteps& steps);

/// Instead of `publish`: tells the others that this rank does not take part.
void give_up(const Publication& publication, const std::string& reason);

/// Removes what dead saves have left of TARGETs in `parent` whose names begin so.
/// `now` is a time of that file system.
void remove_leftovers(const Path& parent, const std::string& name_begin, int64_t now);

/// For tests: false is as on a file system that cannot exchange.
extern bool has_exchange;

/// "rank_00003"
std::string rank_name(int rank);

} // namespace fsdp::detail
