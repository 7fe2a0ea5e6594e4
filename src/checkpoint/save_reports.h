#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::detail {

/// The ranks of one save.
struct SaveRanks {
  int rank = 0;
  int size = 1;
  c10::intrusive_ptr<c10d::Store> store = {}; // null if there is one rank
  /// How long a rank waits for the others.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Returns true if a rank has died. Empty if nobody can tell.
  std::function<bool(int rank)> is_gone = {};
  /// How long a rank may seem dead before the save fails.
  std::chrono::milliseconds patience = std::chrono::minutes(1);
};

/// The ranks of one save tell each other how it goes through the store of their world. So a save
/// may go on in any thread, while the ranks' collectives are about something else.
class SaveReports {
 public:
  /// `id` belongs to this save alone, and is the same on all ranks. `what` is for messages.
  SaveReports(const SaveRanks& ranks, const std::string& id, std::string what);

  /// Reports that this rank's files are complete.
  void complete();
  /// Reports that this rank has failed: the save fails on all ranks. Returns the reason of the rank
  /// that failed first, which may be the cause. Never throws.
  std::string failed(const std::string& reason);
  /// Throws the reason of the first rank that reported a failure, if one did.
  void check_failed();
  /// Rank 0: waits until all ranks have reported. Throws the reason of the first that failed.
  void wait_for_ranks();
  /// Rank 0: reports that TARGET is the new checkpoint. Waits up to ten seconds until all ranks
  /// know.
  void saved();
  /// The other ranks: wait until rank 0 has reported. Throw the reason if the save failed.
  void wait_for_rank_0();

 private:
  bool has(const std::vector<std::string>& keys);
  void wait(
      std::chrono::milliseconds timeout,
      const std::function<bool()>& is_over,
      const std::function<std::vector<int>()>& awaited);
  std::string key_of(int rank) const;
  void confirm();
  std::string read_failure();
  void wait_until_known(std::chrono::seconds patience);

  const SaveRanks& ranks_;
  const std::string what_;
  const std::string prefix_;
  std::string store_error_; // why the store cannot be reached any more
};

} // namespace fsdp::detail
