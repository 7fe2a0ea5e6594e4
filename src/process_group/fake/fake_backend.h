#pragma once

#include "process_group/c10d_adapter.h"
#include "process_group/group_state.h"

namespace fsdp::detail {

/// Completes every collective at once, without peers. A gather repeats this
/// rank's input, as if each peer had the same; a reduction has this rank's
/// contribution only. For planning and for measuring host cost at any world size.
/// The results are exact in a group of one rank.
class FakeBackend : public LocalBackend {
 public:
  FakeBackend(int rank, int size, const std::string& name = "fake")
      : LocalBackend(rank, size, name) {}

  c10::intrusive_ptr<c10d::Work> issue_call(CollectiveCall call) override;
  bool places_on_devices() const override {
    return true;
  }
};

class FakeFactory : public BackendFactory {
 public:
  explicit FakeFactory(int world_rank) : BackendFactory(world_rank, "fake") {}

 protected:
  c10::intrusive_ptr<c10d::Backend> make(
      const std::string& name, const std::vector<int>& world_ranks, int rank) override;
};

} // namespace fsdp::detail
