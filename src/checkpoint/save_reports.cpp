#include "checkpoint/save_reports.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/text.h"

namespace fsdp::detail {

namespace {

using Clock = std::chrono::steady_clock;

/// Limits the timeout to a year. A longer one could overflow the clock.
std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365));
}

} // namespace

SaveReports::SaveReports(const SaveRanks& ranks, const std::string& id, std::string what)
    : ranks_(ranks), what_(std::move(what)), prefix_("fsdp_save/" + id + "/") {}

std::string SaveReports::key_of(int rank) const {
  return prefix_ + std::to_string(rank);
}

/// Returns true if the store has all keys. If the store cannot be reached, remembers why, and does
/// not try again: the process that serves it may have died, and `wait` finds out who that was.
bool SaveReports::has(const std::vector<std::string>& keys) {
  try {
    return store_error_.empty() && ranks_.store->check(keys);
  } catch (const std::exception&) {
    store_error_ = current_exception_text();
    return false;
  }
}

/// Tells rank 0 that this rank knows the outcome.
void SaveReports::confirm() {
  ranks_.store->set(key_of(ranks_.rank) + "/knows", "yes");
}

/// Returns the reason of the first rank that failed, or "" if none has reported a failure.
std::string SaveReports::read_failure() {
  if (!ranks_.store || !has({prefix_ + "failed"})) {
    return "";
  }
  const auto reason = ranks_.store->get_to_str(prefix_ + "failed");
  confirm();
  return reason;
}

void SaveReports::check_failed() {
  const auto reason = read_failure();
  FSDP_CHECK_AS(CheckpointError, reason.empty(), reason);
}

/// Polls until `is_over`. Throws if a rank has failed or died, or after `timeout`. `awaited` says
/// for which ranks this one waits.
void SaveReports::wait(
    std::chrono::milliseconds timeout,
    const std::function<bool()>& is_over,
    const std::function<std::vector<int>()>& awaited) {
  constexpr auto kLookForDeath = std::chrono::seconds(1); // most saves are over by then
  const auto start = Clock::now();
  auto all_well = start;
  auto next_look = start + kLookForDeath;
  auto pause = std::chrono::microseconds(200);
  while (!is_over()) {
    check_failed();
    const auto now = Clock::now();
    if (now >= next_look) {
      auto gone = awaited();
      std::erase_if(gone, [&](int rank) { return !ranks_.is_gone || !ranks_.is_gone(rank); });
      if (gone.empty() && store_error_.empty()) {
        all_well = now;
      }
      FSDP_CHECK_AS(
          CheckpointError, gone.empty() || now - all_well <= ranks_.patience, "rank ", ranks_.rank,
          ": rank ", join(gone), gone.size() == 1 ? " is" : " are", " gone, and ", what_,
          " is not complete");
      FSDP_CHECK_AS(
          CheckpointError, now - all_well <= ranks_.patience, "rank ", ranks_.rank,
          ": the store of the ranks cannot be reached, and ", what_,
          " is not complete: ", store_error_);
      next_look = now + kLookForDeath;
    }
    FSDP_CHECK_AS(
        CheckpointError, now - start <= timeout, "rank ", ranks_.rank, ": rank ", join(awaited()),
        " did not report on ", what_, " within ", timeout.count(),
        " ms: dead, or slower than the timeout of the save");
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 3 / 2, std::chrono::microseconds(50'000));
  }
}

void SaveReports::complete() {
  if (ranks_.size > 1) {
    ranks_.store->set(key_of(ranks_.rank), "complete");
  }
}

std::string SaveReports::failed(const std::string& reason) {
  try {
    if (ranks_.store && !has({prefix_ + "failed"})) {
      ranks_.store->set(prefix_ + "failed", reason.substr(0, 10'000));
    }
    const auto first = read_failure();
    wait_until_known(std::chrono::seconds(2));
    return first.empty() ? reason : first;
  } catch (const std::exception&) { // the others find out that this rank is gone, or time out
    return reason;
  }
}

void SaveReports::wait_for_ranks() {
  if (ranks_.size == 1) {
    return;
  }
  std::vector<std::string> keys;
  for (int rank = 0; rank < ranks_.size; ++rank) {
    keys.push_back(key_of(rank));
  }
  const auto missing = [&] {
    std::vector<int> found;
    for (int rank = 0; rank < ranks_.size; ++rank) {
      if (!has({keys[rank]})) {
        found.push_back(rank);
      }
    }
    return found;
  };
  wait(bounded(ranks_.timeout), [&] { return has(keys); }, missing);
}

void SaveReports::saved() {
  if (ranks_.size > 1) {
    ranks_.store->set(prefix_ + "saved", "saved");
    wait_until_known(std::chrono::seconds(10));
  }
}

/// Rank 0 waits until the other ranks have read the outcome: its process may serve the store, and
/// may end now. Then nobody needs the keys of this save any more.
void SaveReports::wait_until_known(std::chrono::seconds patience) {
  if (ranks_.rank != 0 || !ranks_.store) {
    return;
  }
  std::vector<std::string> keys;
  for (int rank = 1; rank < ranks_.size; ++rank) {
    keys.push_back(key_of(rank) + "/knows");
  }
  const auto deadline = Clock::now() + patience;
  while (!has(keys)) {
    if (Clock::now() >= deadline) {
      return; // a rank is dead or slow, and may look later
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  try {
    for (int rank = 0; rank < ranks_.size; ++rank) {
      ranks_.store->deleteKey(key_of(rank));
      ranks_.store->deleteKey(key_of(rank) + "/knows");
    }
    ranks_.store->deleteKey(prefix_ + "saved");
    ranks_.store->deleteKey(prefix_ + "failed");
  } catch (const std::exception&) { // the outcome is known all the same
  }
}

void SaveReports::wait_for_rank_0() {
  // Rank 0, which can say who is missing, must give up before this rank.
  const auto timeout = 2 * bounded(ranks_.timeout) + std::chrono::seconds(1);
  wait(timeout, [&] { return has({prefix_ + "saved"}); }, [] { return std::vector{0}; });
  confirm();
}

} // namespace fsdp::detail
