#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "launch/rendezvous.h"
#include "process_group/group_state.h"

namespace fsdp::detail {

/// The arguments of a backend that connects the processes of one group.
struct BackendSpec {
  c10::intrusive_ptr<c10d::Store> store; // of this group only
  int rank = 0;
  int size = 0;
  std::string name;
  std::vector<int> world_ranks;
  std::string address; // to listen on
  std::chrono::milliseconds timeout{};
};

using MakeBackend = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendSpec&)>;

/// Makes groups of processes that are connected by a store.
class StoreFactory : public BackendFactory {
 public:
  StoreFactory(
      Rendezvous rendezvous,
      std::string transport,
      std::chrono::milliseconds timeout,
      MakeBackend make_backend);

  std::string diagnose() override;
  c10::intrusive_ptr<c10d::Store> store() const override {
    return rendezvous_.store;
  }
  std::shared_ptr<Liveness> liveness() const override {
    return rendezvous_.liveness;
  }

 protected:
  c10::intrusive_ptr<c10d::Backend> make(
      const std::string& name, const std::vector<int>& world_ranks, int rank) override;

 private:
  const Rendezvous rendezvous_;
  const std::chrono::milliseconds timeout_;
  const MakeBackend make_backend_;
};

} // namespace fsdp::detail
