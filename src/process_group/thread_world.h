#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "process_group/thread_operation.h"

namespace fsdp::detail {

class ThreadGroup;
struct PendingOperation;

// Note [Collectives among threads]
//
// A rank that calls a collective leaves a record of its tensors and goes on.
// When it waits, and every rank's record is there, it computes parts of the
// operation, one per rank, until none is left: its own or a peer's, whichever
// nobody has begun. So a collective needs its peers to arrive but never to
// wait, ranks may wait in different orders, nothing is copied twice, and what
// is computed does not depend on who computes it. On a device the call itself
// waits for the peers on the host, because kernels must be on the streams when
// it returns; no thread ever waits for the device.
//
// A rank that throws, ends early, or waits for what can no longer happen is
// known here, so its peers get an error at once instead of a time-out.

/// The ranks of one `run_ranks`, and who among them has ended or failed. One
/// mutex guards the world and all its groups: ranks meet rarely and briefly.
class ThreadWorld : public std::enable_shared_from_this<ThreadWorld> {
 public:
  ThreadWorld(int size, std::chrono::milliseconds timeout);

  int size() const {
    return static_cast<int>(ended_.size());
  }

  /// The group of that name; the first rank to ask makes it.
  std::shared_ptr<ThreadGroup> group(const std::string& name, const std::vector<int>& world_ranks);

  /// Names the calling thread as the one that runs `world_rank`.
  void enter(int world_rank);
  /// The rank's body has returned: who waits for it gets an error.
  void leave(int world_rank);
  /// The rank threw `reason`: everybody who waits gets an error.
  void abort(int world_rank, const std::string& reason);
  /// Whether a rank has ended: then no new member can take part.
  bool somebody_left() const;

 private:
  friend class ThreadGroup;

  /// What a rank waits for its peers in; nothing when `pending` is null.
  struct Waiting {
    const ThreadGroup* group = nullptr;
    const PendingOperation* pending = nullptr;
  };

  /// Throws when the calling rank is not to wait any longer.
  void check_failed() const;
  void fail(std::string reason);
  void wake_all();
  /// Remembers whether a thread acts for a rank that it does not run.
  void note_thread(int world_rank);
  /// Called by a rank that is about to wait for peers: if every rank that is
  /// left waits for peers too, nothing can ever happen again.
  void check_deadlock();

  const std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  std::string failure_; // the first; not empty means all over
  std::vector<bool> ended_;
  std::vector<std::thread::id> threads_; // by rank; of those that entered
  std::vector<Waiting> waiting_;         // by rank
  bool strangers_ = false;               // threads that are no rank's have called collectives
  std::map<std::string, std::weak_ptr<ThreadGroup>> groups_;
};

/// One collective of a group, from the first rank's call to the last part.
struct PendingOperation {
  uint64_t number = 0;
  std::vector<CollectiveKind> kinds;              // by rank
  std::vector<std::optional<ThreadCall>> arrived; // until all are there
  size_t num_arrived = 0;
  std::optional<ThreadOperation> operation; // from then on
  size_t next_part = 0;
  size_t num_done = 0;
  std::string error;
  std::condition_variable changed;

  bool ready() const {
    return operation.has_value() || !error.empty();
  }
  /// Nobody touches a tensor any more: after an error no part is begun, but those that
  /// were go on.
  bool complete() const {
    return num_done == (error.empty() ? kinds.size() : next_part);
  }
};

class ThreadGroup {
 public:
  ThreadGroup(std::shared_ptr<ThreadWorld> world, std::string name, std::vector<int> world_ranks);

  /// Records what `rank` brings to its next collective.
  std::shared_ptr<PendingOperation> post(int rank, CollectiveCall call);

  /// Returns when the collective is complete, having helped. Throws CommError.
  void wait(int rank, PendingOperation& pending);

  const std::vector<int>& world_ranks() const {
    return world_ranks_;
  }

 private:
  friend class ThreadWorld;

  void begin(PendingOperation& pending);
  void wait_for_peers(std::unique_lock<std::mutex>& lock, int rank, PendingOperation& pending);
  void run_parts(std::unique_lock<std::mutex>& lock, PendingOperation& pending);
  std::vector<int> missing(const PendingOperation& pending) const;
  std::string describe(int world_rank, const PendingOperation& pending) const;

  const std::shared_ptr<ThreadWorld> world_;
  const std::string name_;
  const std::vector<int> world_ranks_;
  std::vector<uint64_t> next_number_;                             // by rank
  std::map<uint64_t, std::shared_ptr<PendingOperation>> pending_; // not all arrived
};

} // namespace fsdp::detail
