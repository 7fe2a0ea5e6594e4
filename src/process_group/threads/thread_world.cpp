#include "process_group/threads/thread_world.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/text.h"

namespace fsdp::detail {

// ------------------------------------------------------------------ ThreadWorld

ThreadWorld::ThreadWorld(int size, std::chrono::milliseconds timeout)
    : timeout_(timeout), ended_(size), threads_(size), waiting_(size) {}

std::shared_ptr<ThreadGroup> ThreadWorld::group(
    const std::string& name, const std::vector<int>& world_ranks) {
  std::lock_guard lock(mutex_);
  auto& known = groups_[name];
  auto group = known.lock();
  if (!group) {
    group = std::make_shared<ThreadGroup>(shared_from_this(), name, world_ranks);
    known = group;
  }
  return group;
}

void ThreadWorld::enter(int world_rank) {
  std::lock_guard lock(mutex_);
  FSDP_CHECK_AS(
      CommError, threads_[world_rank] == std::thread::id(), "rank ", world_rank,
      " is taken: two threads asked for it");
  threads_[world_rank] = std::this_thread::get_id();
}

void ThreadWorld::leave(int world_rank) {
  std::lock_guard lock(mutex_);
  ended_[world_rank] = true;
  wake_all();
}

void ThreadWorld::abort(int world_rank, const std::string& reason) {
  std::lock_guard lock(mutex_);
  ended_[world_rank] = true;
  fail(c10::str("rank ", world_rank, " failed first: ", reason));
}

bool ThreadWorld::somebody_left() const {
  std::lock_guard lock(mutex_);
  return std::find(ended_.begin(), ended_.end(), true) != ended_.end();
}

void ThreadWorld::note_thread(int world_rank) {
  has_foreign_threads_ |= threads_[world_rank] != std::this_thread::get_id();
}

void ThreadWorld::check_failed() const {
  FSDP_CHECK_AS(CommError, failure_.empty(), failure_);
}

void ThreadWorld::fail(std::string reason) {
  if (failure_.empty()) {
    failure_ = std::move(reason);
  }
  wake_all();
}

void ThreadWorld::wake_all() {
  for (const auto& [name, known] : groups_) {
    if (const auto group = known.lock()) {
      for (const auto& [number, pending] : group->pending_) {
        pending->changed.notify_all();
      }
    }
  }
}

void ThreadWorld::check_deadlock() {
  if (has_foreign_threads_) {
    return; // a thread other than the rank's own may still make the missing call
  }
  std::vector<std::string> waits;
  for (int rank = 0; rank < size(); ++rank) {
    if (ended_[rank]) {
      continue;
    }
    const auto& [group, pending] = waiting_[rank];
    if (!pending) {
      return;
    }
    waits.push_back(
        group->describe(rank, *pending) + " waits for rank " + join(group->missing(*pending)));
  }
  fail("every rank waits for another: " + join(waits, "; "));
}

// ------------------------------------------------------------------ ThreadGroup

ThreadGroup::ThreadGroup(
    std::shared_ptr<ThreadWorld> world, std::string name, std::vector<int> world_ranks)
    : world_(std::move(world)),
      name_(std::move(name)),
      world_ranks_(std::move(world_ranks)),
      next_number_(world_ranks_.size()) {}

std::shared_ptr<PendingOperation> ThreadGroup::post(int rank, CollectiveCall call) {
  ThreadCall record(std::move(call));
  std::lock_guard lock(world_->mutex_);
  world_->check_failed();
  world_->note_thread(world_ranks_[rank]);
  const auto number = next_number_[rank]++;
  auto& entry = pending_[number];
  if (!entry) {
    entry = std::make_shared<PendingOperation>();
    entry->number = number;
    entry->kinds.resize(world_ranks_.size());
    entry->arrived.resize(world_ranks_.size());
  }
  const auto pending = entry;
  pending->kinds[rank] = record.call.kind;
  pending->arrived[rank] = std::move(record);
  if (++pending->num_arrived == world_ranks_.size()) {
    begin(*pending);
    pending_.erase(number);
  }
  return pending;
}

void ThreadGroup::begin(PendingOperation& pending) {
  std::vector<ThreadCall> calls;
  for (auto& record : pending.arrived) {
    calls.push_back(std::move(*record));
  }
  try {
    pending.error = ThreadOperation::mismatch(calls, world_ranks_);
  } catch (...) {
    pending.error = current_exception_text();
  }
  if (pending.error.empty()) {
    pending.operation.emplace(std::move(calls));
  }
  for (const int rank : world_ranks_) {
    if (world_->waiting_[rank].pending == &pending) {
      world_->waiting_[rank] = {};
    }
  }
  pending.changed.notify_all();
}

void ThreadGroup::wait(int rank, PendingOperation& pending) {
  std::unique_lock lock(world_->mutex_);
  world_->note_thread(world_ranks_[rank]);
  wait_for_peers(lock, rank, pending);
  run_parts(lock, pending);
  pending.changed.wait(lock, [&] { return pending.complete(); });
  FSDP_CHECK_AS(
      CommError, pending.error.empty(), describe(world_ranks_[rank], pending), ": ", pending.error);
  pending.operation->order_after_parts(rank);
}

void ThreadGroup::wait_for_peers(
    std::unique_lock<std::mutex>& lock, int rank, PendingOperation& pending) {
  const auto deadline = std::chrono::steady_clock::now() + world_->timeout_;
  const int world_rank = world_ranks_[rank];
  while (!pending.ready()) {
    world_->check_failed();
    for (const int peer : missing(pending)) {
      FSDP_CHECK_AS(
          CommError, !world_->ended_[peer], describe(world_rank, pending), ": rank ", peer,
          " has ended and will never take part");
    }
    world_->waiting_[world_rank] = {this, &pending};
    world_->check_deadlock();
    world_->check_failed();
    const bool late = pending.changed.wait_until(lock, deadline) == std::cv_status::timeout;
    world_->waiting_[world_rank] = {};
    FSDP_CHECK_AS(
        CommError, !late || pending.ready(), describe(world_rank, pending), ": no call from rank ",
        join(missing(pending)), " within ", world_->timeout_.count(), " ms");
  }
}

void ThreadGroup::run_parts(std::unique_lock<std::mutex>& lock, PendingOperation& pending) {
  while (pending.error.empty() && pending.next_part < world_ranks_.size()) {
    const auto part = static_cast<int>(pending.next_part++);
    lock.unlock();
    std::string error;
    try {
      pending.operation->run_part(part);
    } catch (...) {
      error = current_exception_text();
    }
    lock.lock();
    ++pending.num_done;
    if (pending.error.empty()) {
      pending.error = error;
    }
    if (pending.complete()) {
      pending.operation->release();
      pending.changed.notify_all();
    }
  }
}

std::vector<int> ThreadGroup::missing(const PendingOperation& pending) const {
  std::vector<int> ranks;
  for (size_t i = 0; i < pending.arrived.size(); ++i) {
    if (!pending.arrived[i]) {
      ranks.push_back(world_ranks_[i]);
    }
  }
  return ranks;
}

std::string ThreadGroup::describe(int world_rank, const PendingOperation& pending) const {
  const auto rank = std::find(world_ranks_.begin(), world_ranks_.end(), world_rank);
  return c10::str(
      to_string(pending.kinds[rank - world_ranks_.begin()]), " #", pending.number, " in group '",
      name_, "' on rank ", world_rank);
}

} // namespace fsdp::detail
