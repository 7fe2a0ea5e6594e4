#pragma once

#include <torch/csrc/distributed/c10d/HashStore.hpp>

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

#include "process_group/threads/thread_operation.h"

namespace fsdp::detail {

class ThreadGroup;
struct PendingOperation;

// Note [Collectives among threads]
//
// A rank that calls a collective leaves a record of its tensors and goes on. The
// operation has one part per rank. A rank that waits first waits until all ranks'
// records are there. Then it computes parts that nobody has begun, its own or a
// peer's, until none is left. It follows:
// - A collective needs its peers to call it, but not to wait for it.
// - Ranks may wait in different orders.
// - Nothing is copied twice.
// - The result does not depend on which thread computes a part.
// On a device the call itself waits for the peers on the host, because the kernels
// must be on the streams when it returns. No thread ever waits for the device.
//
// The world knows of every rank that throws, ends early, or waits for a call that
// cannot come. So its peers get an error at once instead of a time-out.

/// The ranks of one world, and which of them have ended or failed. One mutex guards
/// the world and all its groups, because ranks hold it rarely and briefly.
class ThreadWorld : public std::enable_shared_from_this<ThreadWorld> {
 public:
  ThreadWorld(int size, std::chrono::milliseconds timeout);

  int size() const {
    return static_cast<int>(ended_.size());
  }

  const c10::intrusive_ptr<c10d::Store>& store() const {
    return store_;
  }

  /// Returns the group of that name. The first rank that asks makes the group.
  std::shared_ptr<ThreadGroup> group(const std::string& name, const std::vector<int>& world_ranks);

  /// Makes the calling thread the one that runs `world_rank`.
  void enter(int world_rank);
  /// Records that the rank has ended. Ranks that wait for it get an error.
  void leave(int world_rank);
  /// Records that the rank threw `reason`. All ranks that wait for peers get an error.
  void abort(int world_rank, const std::string& reason);
  /// Returns true if a rank has ended. Then the world takes no new ranks.
  bool somebody_left() const;

 private:
  friend class ThreadGroup;

  /// The collective in which a rank waits for its peers to arrive. `pending` is null
  /// if the rank does not wait.
  struct Waiting {
    const ThreadGroup* group = nullptr;
    const PendingOperation* pending = nullptr;
  };

  /// Throws CommError if the world has failed.
  void check_failed() const;
  void fail(std::string reason);
  void wake_all();
  /// Remembers if the calling thread acts for a rank that it does not run.
  void note_thread(int world_rank);
  /// Called by a rank that is about to wait for its peers. If all ranks that have not
  /// ended wait for peers, none of them can ever go on: then the world fails.
  void check_deadlock();

  const std::chrono::milliseconds timeout_;
  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  mutable std::mutex mutex_;
  std::string failure_;                  // the first one; "": the world has not failed
  std::vector<bool> ended_;              // by rank
  std::vector<std::thread::id> threads_; // by rank; only of ranks that have entered
  std::vector<Waiting> waiting_;         // by rank
  bool has_foreign_threads_ = false;     // a thread has acted for a rank that it does not run
  std::map<std::string, std::weak_ptr<ThreadGroup>> groups_;
};

/// One collective of a group, from the first rank's call to the end of the last part.
struct PendingOperation {
  uint64_t number = 0;
  std::vector<CollectiveKind> kinds;              // by rank
  std::vector<std::optional<ThreadCall>> arrived; // by rank; moved away when all are there
  size_t num_arrived = 0;
  std::optional<ThreadOperation> operation; // set when all ranks have arrived
  size_t next_part = 0;
  size_t num_done = 0;
  std::string error;
  std::condition_variable changed;

  bool ready() const {
    return operation.has_value() || !error.empty();
  }
  /// Returns true if no thread uses the tensors any more. After an error no new part
  /// is begun, but parts that were begun run to their end.
  bool complete() const {
    return num_done == (error.empty() ? kinds.size() : next_part);
  }
};

class ThreadGroup {
 public:
  ThreadGroup(std::shared_ptr<ThreadWorld> world, std::string name, std::vector<int> world_ranks);

  /// Records the call of `rank`'s next collective.
  std::shared_ptr<PendingOperation> post(int rank, CollectiveCall call);

  /// Computes parts of the collective, and returns when all parts are done. Throws
  /// CommError.
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
  std::map<uint64_t, std::shared_ptr<PendingOperation>> pending_; // until all ranks have arrived
};

} // namespace fsdp::detail
