#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::detail {

class BackendFactory;
class Liveness;

/// What the copies of a ProcessGroup share.
struct GroupState {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::string name;
  std::vector<int> world_ranks;
  std::weak_ptr<BackendFactory> factory; // none for a user's own backend
  std::atomic<uint64_t> num_calls{0};
};

/// Makes the groups of one rank over one transport, and keeps them: asking
/// again for the same ranks must give the same group on every rank, however
/// long each rank held on to the first.
class BackendFactory : public std::enable_shared_from_this<BackendFactory> {
 public:
  virtual ~BackendFactory() = default;

  std::shared_ptr<GroupState> group(const std::vector<int>& world_ranks, const std::string& tag);

  /// After a failed collective: which peers are gone, as a sentence, or "".
  virtual std::string diagnose() {
    return "";
  }
  /// Tells which ranks are gone; null where a rank that is gone fails the others by itself.
  virtual std::shared_ptr<Liveness> liveness() const {
    return nullptr;
  }

 protected:
  /// `transport` is the backend's name.
  BackendFactory(int world_rank, std::string transport)
      : world_rank_(world_rank), transport_(std::move(transport)) {}

  /// For two ranks or more. `name` is the same on every member; `rank` indexes
  /// `world_ranks`.
  virtual c10::intrusive_ptr<c10d::Backend> make(
      const std::string& name, const std::vector<int>& world_ranks, int rank) = 0;

 private:
  const int world_rank_;
  const std::string transport_;
  std::mutex mutex_;
  std::map<std::pair<std::vector<int>, std::string>, std::shared_ptr<GroupState>> groups_;
};

} // namespace fsdp::detail
