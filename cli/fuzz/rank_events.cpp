// What happens before a microbatch.
#include <torch/torch.h>

#include <fsdp/param.h>
#include <fsdp/state_dict.h>

#include "cli/fuzz/rank_run.h"

namespace fsdp::cli::fuzz {

namespace {

template <class F>
void expect_refused(const char* kind, F call) {
  try {
    call();
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    if (message.find("[fully_shard]") == std::string::npos) {
      throw;
    }
    return;
  }
  throw Difference(kind, "nothing was thrown");
}

} // namespace

void RankRun::happen(const Event& event) {
  const auto& step = case_.steps[step_];
  switch (event.action) {
    case Action::Evaluate: {
      const torch::NoGradGuard no_grad;
      call_both(step, event.microbatch, 2);
      break;
    }
    case Action::Abandon:
      call_both(step, event.microbatch, 3);
      break;
    case Action::Unshard:
      groups_[event.target].unshard();
      break;
    case Action::UnshardAsync:
      (void)groups_[event.target].unshard(/*async_op=*/true);
      break;
    case Action::UnshardReshard:
      groups_[event.target].unshard();
      compare_wholes(event.target);
      groups_[event.target].reshard();
      break;
    case Action::Reshard:
      groups_[event.target].reshard();
      break;
    case Action::ShardedState:
      save_and_load();
      break;
    case Action::FullState:
      compare_full_state();
      break;
    case Action::EditShards:
    case Action::EditParameters:
    case Action::EditData:
      edit(event.action);
      break;
    case Action::CallAround:
      call_around(event.target);
      break;
    case Action::WriteWhole:
      write_whole(event.target);
      break;
    case Action::SetReshard:
      groups_[event.target].set_reshard_after_forward(event.value, /*recurse=*/false);
      break;
    case Action::Thaw:
      thaw(event.target, event.value);
      break;
  }
}

void RankRun::edit(Action action) {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) {
    auto target = action == Action::EditShards       ? as_dtensor(params_[i]).to_local()
                  : action == Action::EditParameters ? params_[i]
                                                     : params_[i].data();
    target.mul_(0.5);
    plain_params_[i].mul_(0.5);
  }
}

void RankRun::thaw(int number, bool frozen) {
  for (auto* net : {&net_, &plain_}) {
    for (auto& param : all_nodes(*net)[number]->parameters(/*recurse=*/false)) {
      param.set_requires_grad(!frozen);
    }
  }
}

/// A module that is called without its hooks must not compute with shards.
void RankRun::call_around(int number) {
  auto& node = *all_nodes(net_)[number];
  const auto& group = case_.groups[node.block.group];
  const bool contracts = !is_container(node.block.kind) && node.block.kind != Kind::Scale;
  if (contracts && group.mesh != Mesh::Replicate && group.min_shard_numel == 0) {
    expect_refused("a call around the hooks is not noticed", [&] {
      node.NodeImpl::forward(torch::ones({2, case_.dim}, case_.dtype));
    });
  }
}

/// Writes to a whole parameter would be lost, unless this rank's shard is all of it.
void RankRun::write_whole(int group) {
  if (case_.ranks == 1) {
    return;
  }
  for (auto* node : all_nodes(net_)) {
    auto params = node->parameters(/*recurse=*/false);
    if (node->block.group == group && !params.empty() &&
        case_.groups[group].mesh != Mesh::Replicate && case_.groups[group].min_shard_numel == 0) {
      groups_[group].unshard();
      {
        const torch::NoGradGuard no_grad;
        params[0].add_(1);
      }
      expect_refused(
          "a write to a whole parameter is not noticed", [&] { groups_[group].reshard(); });
      groups_[group].reshard(); // only the first call refuses
      return;
    }
  }
}

void RankRun::save_and_load() {
  StateDict saved;
  for (const auto& [key, value] : get_model_state_dict(net_)) {
    const auto& spread = std::get<DTensor>(value);
    saved.insert(
        key, DTensor::from_local(
                 spread.to_local().clone(), spread.device_mesh(), spread.placements(),
                 spread.sizes().vec()));
  }
  {
    const torch::NoGradGuard no_grad;
    for (const auto& param : params_) {
      as_dtensor(param).to_local().mul_(3);
    }
  }
  set_model_state_dict(net_, saved);
}

} // namespace fsdp::cli::fuzz
