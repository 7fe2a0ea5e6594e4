#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::detail {

class AgreedCalls;
class BackendFactory;
class CallHistory;
class Liveness;

/// The state that all copies of a ProcessGroup share.
struct GroupState {
  ~GroupState();

  c10::intrusive_ptr<c10d::Backend> backend;
  std::string name;
  std::vector<int> world_ranks;
  std::weak_ptr<BackendFactory> factory; // empty if the user made the backend
  // One of them, or none if the backend compares calls itself. See Note [Ranks that agree].
  std::unique_ptr<AgreedCalls> agreed_calls;
  std::unique_ptr<CallHistory> history;

  /// Sets how the ranks compare their calls.
  void choose_comparison(bool is_ours);
};

/// Makes the groups of one rank over one transport, and keeps them. A second
/// request for the same ranks must give the same group on every rank, even if
/// some ranks have dropped their first one.
class BackendFactory : public std::enable_shared_from_this<BackendFactory> {
 public:
  virtual ~BackendFactory() = default;

  std::shared_ptr<GroupState> group(const std::vector<int>& world_ranks, const std::string& tag);

  /// Ends the groups whose backend does not end itself when it is dropped.
  void end_groups();

  /// Returns a sentence that says which peers are gone, for the message of a
  /// failed collective, or "".
  virtual std::string diagnose() {
    return "";
  }
  /// Returns a store that all ranks of the world share. Null if the transport has none.
  virtual c10::intrusive_ptr<c10d::Store> store() const {
    return nullptr;
  }
  /// Returns the object that tells which ranks are gone. Null if the transport itself reports a
  /// rank that is gone.
  virtual std::shared_ptr<Liveness> liveness() const {
    return nullptr;
  }

 protected:
  /// `transport` is the backend's name.
  BackendFactory(int world_rank, std::string transport)
      : world_rank_(world_rank), transport_(std::move(transport)) {}

  /// Makes the backend of a group of two ranks or more. `name` is the same on
  /// every member. `rank` is this rank's index in `world_ranks`.
  virtual c10::intrusive_ptr<c10d::Backend> make(
      const std::string& name, const std::vector<int>& world_ranks, int rank) = 0;
  /// Sets how the ranks of a new group compare their calls.
  virtual void choose_comparison(GroupState& group) const {
    group.choose_comparison(/*is_ours=*/true);
  }

 private:
  const int world_rank_;
  const std::string transport_;
  std::mutex mutex_;
  std::map<std::pair<std::vector<int>, std::string>, std::shared_ptr<GroupState>> groups_;
};

} // namespace fsdp::detail
