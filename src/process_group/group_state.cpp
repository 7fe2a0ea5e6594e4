#include "process_group/group_state.h"

#include <algorithm>
#include <set>

#include "base/check.h"
#include "base/text.h"
#include "process_group/agreement.h"
#include "process_group/c10d_adapter.h"
#include "process_group/fake/fake_backend.h"

namespace fsdp::detail {

GroupState::~GroupState() = default;

void GroupState::choose_comparison(bool is_ours) {
  if (backend->getSize() == 1 || dynamic_cast<const LocalBackend*>(backend.get()) ||
      !checks_collectives()) {
    return;
  }
  const Members members{backend, name, world_ranks};
  if (is_ours && backend->getBackendName() == "gloo") {
    agreed_calls = std::make_unique<AgreedCalls>(members);
  } else {
    history = std::make_unique<CallHistory>(members);
  }
}

std::shared_ptr<GroupState> BackendFactory::group(
    const std::vector<int>& world_ranks, const std::string& tag) {
  const auto self = std::find(world_ranks.begin(), world_ranks.end(), world_rank_);
  TORCH_CHECK_VALUE(
      self != world_ranks.end(), "[new_group] rank ", world_rank_, " is not one of the ranks ",
      join(world_ranks));
  TORCH_CHECK_VALUE(
      std::set<int>(world_ranks.begin(), world_ranks.end()).size() == world_ranks.size(),
      "[new_group] the ranks ", join(world_ranks), " are not all different");
  std::lock_guard lock(mutex_);
  auto& state = groups_[{world_ranks, tag}];
  if (!state) {
    auto name = join(world_ranks, "-") + (tag.empty() ? "" : "/" + tag);
    auto made = std::make_shared<GroupState>();
    // A group of one rank needs no transport: the fake backend is exact there.
    if (world_ranks.size() == 1) {
      made->backend = c10::make_intrusive<FakeBackend>(0, 1, transport_);
    } else {
      made->backend = make(name, world_ranks, static_cast<int>(self - world_ranks.begin()));
    }
    made->name = std::move(name);
    made->world_ranks = world_ranks;
    made->factory = weak_from_this();
    choose_comparison(*made);
    state = std::move(made);
  }
  return state;
}

} // namespace fsdp::detail
