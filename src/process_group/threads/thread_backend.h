#pragma once

#include <memory>
#include <string>
#include <vector>

#include "process_group/c10d_adapter.h"
#include "process_group/group_state.h"
#include "process_group/threads/thread_world.h"

namespace fsdp::detail {

/// The backend of one rank in a ThreadGroup; see Note [Collectives among threads].
class ThreadBackend : public LocalBackend {
 public:
  ThreadBackend(std::shared_ptr<ThreadGroup> group, int rank);

  c10::intrusive_ptr<c10d::Work> issue_call(CollectiveCall call) override;

 private:
  const std::shared_ptr<ThreadGroup> group_;
};

class ThreadFactory : public BackendFactory {
 public:
  ThreadFactory(std::shared_ptr<ThreadWorld> world, int world_rank)
      : BackendFactory(world_rank, "threads"), world_(std::move(world)) {}

  c10::intrusive_ptr<c10d::Store> store() const override {
    return world_->store();
  }

 protected:
  c10::intrusive_ptr<c10d::Backend> make(
      const std::string& name, const std::vector<int>& world_ranks, int rank) override;

 private:
  const std::shared_ptr<ThreadWorld> world_;
};

} // namespace fsdp::detail
