#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::python {

/// The ranks of a group, which tell each other which of their collectives was the first to fail. A
/// rank that says nothing is late or gone, or waits still.
class Failures : public std::enable_shared_from_this<Failures> {
 public:
  /// The ranks share `store`, which may be null.
  Failures(c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<int> world_ranks);

  /// Returns sentences about the ranks that have not failed, and those where other calls have.
  /// Empty after the group's first failure.
  std::string report(const std::string& call);

 private:
  std::string ask(const std::string& call) const;
  std::vector<int> silent_ranks() const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const std::vector<int> world_ranks_;
  std::atomic<bool> reported_ = false;
};

} // namespace fsdp::python
