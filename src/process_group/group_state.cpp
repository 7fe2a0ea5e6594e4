#include "process_group/group_state.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <set>
#include <system_error>
#include <thread>

#include "base/text.h"
#include "launch/liveness.h"
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

void BackendFactory::end_groups() {
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, group] : groups_) {
      if (group->backend->getBackendName() == "nccl") {
        backends.push_back(group->backend);
      }
    }
  }
  if (backends.empty()) {
    return;
  }
  // A group that ends in order waits for its other ranks. All ranks end their groups in the same
  // order. A rank that throws does not wait for others, and nobody waits for a rank that is gone.
  const auto alive = liveness();
  const bool in_order = std::uncaught_exceptions() == 0 && (!alive || alive->gone().empty());
  const auto ended = std::make_shared<std::promise<void>>();
  const auto end_all = [backends = std::move(backends), in_order, ended] {
    for (const auto& backend : backends) {
      try {
        in_order ? backend->shutdown() : backend->abort();
      } catch (const std::exception&) { // NOLINT(bugprone-empty-catch): it has failed before
      }
    }
    ended->set_value();
  };
  try {
    std::thread(end_all).detach();     // is left behind with the groups if they do not end in time
  } catch (const std::system_error&) { // no more threads
    return;
  }
  constexpr auto kPatience = std::chrono::seconds(3);
  ended->get_future().wait_for(kPatience);
}

} // namespace fsdp::detail
