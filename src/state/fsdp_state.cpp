#include "state/fsdp_state.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "runtime/range.h"
#include "state/autograd_hooks.h"
#include "state/graph_check.h"

namespace fsdp::detail {

namespace {

void erase(std::vector<const void*>& modules, const void* module) {
  const auto found = std::find(modules.begin(), modules.end(), module);
  if (found != modules.end()) {
    modules.erase(found);
  }
}

bool contains(const std::vector<const void*>& modules, const void* module) {
  return std::find(modules.begin(), modules.end(), module) != modules.end();
}

void cast_floating(const std::vector<at::Tensor*>& tensors, at::ScalarType dtype) {
  for (auto* tensor : tensors) {
    if (tensor->defined() && tensor->is_floating_point() && tensor->scalar_type() != dtype) {
      *tensor = tensor->to(dtype);
    }
  }
}

} // namespace

FSDPState::FSDPState(
    std::string name,
    std::vector<const void*> modules,
    c10::Device device,
    Groups groups,
    SubtreeFunction get_subtree)
    : name_(std::move(name)),
      modules_(std::move(modules)),
      device_(device),
      groups_(std::move(groups)),
      get_subtree_(std::move(get_subtree)) {
  for (const auto& group : groups_) {
    group->comm = comm_;
  }
}

std::vector<std::shared_ptr<FSDPState>> FSDPState::states_below() const {
  return states_in(get_subtree_(/*with_tensors=*/false));
}

std::vector<std::shared_ptr<FSDPState>> FSDPState::states_in(const Subtree& below) {
  std::vector<std::shared_ptr<FSDPState>> states;
  for (const auto& node : below.nodes) {
    if (std::find(states.begin(), states.end(), node.state) == states.end()) {
      states.push_back(node.state);
    }
  }
  return states;
}

void FSDPState::enter(TrainingState next) {
  TORCH_INTERNAL_ASSERT(
      training_state_ == TrainingState::Idle || next == TrainingState::Idle ||
          is_of_backward(training_state_) == is_of_backward(next),
      module_text(name_), " cannot become ", to_string(next), " while it is ",
      to_string(training_state_));
  training_state_ = next;
}

// ------------------------------------------------------------ Forward

bool FSDPState::is_running(const void* module) const {
  return contains(running_, module);
}

bool FSDPState::pre_forward(const void* module) {
  running_.push_back(module);
  if (in_backward()) {
    recompute_forward();
    return false;
  }
  if (!initialized_) {
    lazy_init();
  }
  const bool begins = training_state_ != TrainingState::Forward || !context_->forward_root;
  enter(TrainingState::Forward);
  if (!context_->forward_root) {
    begin_root_forward();
  }
  if (modules_.size() > 1 && yet_to_forward_.empty()) {
    yet_to_forward_ = modules_;
  }
  for (const auto& group : groups_) {
    group->pre_forward(begins);
  }
  if (begins) {
    for (const auto& weak : forward_prefetch) {
      if (const auto next = weak.lock()) {
        for (const auto& group : next->groups_) {
          group->prefetch(UnshardFor::ForwardPrefetch);
        }
      }
    }
  }
  return begins;
}

/// Backward has gathered the parameters already. But the backward of another forward of this
/// module may have freed them since, or may not need them (set_unshard_in_backward).
void FSDPState::recompute_forward() {
  check_updated();
  for (const auto& group : groups_) {
    group->unshard(UnshardFor::Recomputation);
    group->wait_for_unshard(UnshardFor::Recomputation);
  }
}

/// Begins the outermost forward, which need not be that of the root. Gathers see what the
/// optimizer has written.
void FSDPState::begin_root_forward() {
  const Range range("root_pre_forward");
  context_->forward_root = this;
  context_->num_forwards += at::GradMode::is_enabled() ? 1 : 0;
  keep_backward_in_its_thread(device_);
  auto& buffers = comm_->reductions.max_input_buffers;
  for (const auto& weak : context_->states) {
    if (const auto state = weak.lock()) {
      for (const auto& group : state->groups_) {
        buffers = std::max(buffers, group->max_input_buffers);
      }
    }
  }
  if (context_->post_optim_event) {
    comm_->gather_after(*context_->post_optim_event);
    context_->post_optim_event.reset();
  } else {
    comm_->gather_after(StreamEvent::of(optional_current_stream(device_)));
  }
}

/// The forwards 1, 2, 4, 8 and so on of a root are checked: a mistake is found early, and the check
/// costs nothing in the long run.
bool FSDPState::is_graph_checked() const {
  return checks_graph && context_->forward_root == this && at::GradMode::is_enabled() &&
         !inside_backward() && std::has_single_bit(context_->num_forwards);
}

void FSDPState::check_graph_of(
    const std::vector<at::Tensor*>& outputs, std::vector<NodePtr> begin) const {
  ForwardGraph forward{
      .module = name_,
      .outputs = outputs,
      .begin = std::move(begin),
      .registered = {},
      .managed = {}};
  for (const auto& [name, param] : get_subtree_(/*with_tensors=*/true).params) {
    forward.registered.push_back(param);
    if (const auto* managed = FSDPParam::find(param)) {
      forward.managed.push_back(managed);
    }
  }
  check_graph(forward);
}

void FSDPState::replace_inputs(const std::vector<at::Tensor*>& tensors, bool begins) {
  if (begins && is_graph_checked()) {
    context_->graph_begin = graph_begin(tensors);
  }
  if (has_streams(device_) && context_->forward_root == this) {
    const Range range("inputs_to_device");
    for (auto* tensor : tensors) {
      if (tensor->defined()) {
        *tensor = tensor->to(device_);
      }
    }
  }
  // A recomputation casts them too: it sees the dtypes that the forward has seen.
  if (precision.cast_forward_inputs && precision.param_dtype) {
    const Range range("cast_forward_inputs");
    cast_floating(tensors, *precision.param_dtype);
  }
  if (begins && !groups_.empty()) {
    call_after_gradients(tensors, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) {
        self->post_backward();
      }
    });
  }
}

void FSDPState::post_forward(const void* module, const std::vector<at::Tensor*>& outputs) {
  end_forward(module, outputs);
  if (precision.output_dtype) {
    const Range range("cast_forward_outputs");
    cast_floating(outputs, *precision.output_dtype);
  }
}

void FSDPState::end_forward(const void* module, const std::vector<at::Tensor*>& outputs) {
  erase(running_, module);
  check_outputs(outputs);
  if (in_backward()) {
    return; // backward recomputes this forward
  }
  const bool is_root = context_->forward_root == this && running_.empty();
  if (modules_.size() > 1) {
    const bool is_new = contains(yet_to_forward_, module);
    erase(yet_to_forward_, module);
    if (!is_new || !yet_to_forward_.empty()) {
      if (is_root) {
        end_partial_forward(outputs);
      }
      return;
    }
  }
  if (is_root) {
    if (is_graph_checked()) {
      check_graph_of(outputs, std::exchange(context_->graph_begin, {}));
    }
    const auto hooks = end_root_forward();
    call_at_each_gradient(outputs, [hooks] {
      for (const auto& hook : hooks) {
        hook();
      }
    });
  } else {
    call_at_each_gradient(outputs, complete_forward());
  }
}

/// Ends the forward of one of several modules that was called by itself: a loss head in chunks,
/// for example. Its parameters stay until its own backward.
void FSDPState::end_partial_forward(const std::vector<at::Tensor*>& outputs) {
  enter(TrainingState::Idle);
  yet_to_forward_.clear();
  context_->forward_root = nullptr;
  if (at::GradMode::is_enabled()) {
    call_at_each_gradient(outputs, backward_hook(/*partial=*/true));
  } else {
    complete_forward();
  }
  comm_->release_retired();
}

/// Ends the forward of this state. Returns the hook for the gradients of its outputs.
FSDPState::BackwardHook FSDPState::complete_forward() {
  if (!inside_backward()) { // else recomputed: backward still needs the parameters
    for (const auto& group : groups_) {
      group->post_forward();
    }
  }
  enter(TrainingState::Idle);
  return backward_hook(/*partial=*/false);
}

/// Ends the outermost forward. Returns the hooks for the gradients of its outputs.
FSDPState::BackwardHooks FSDPState::end_root_forward() {
  BackwardHooks hooks{complete_forward()};
  // A state whose modules did not all run cannot know when its backward begins. It is assumed that
  // it begins with that of the outermost module.
  for (auto weak = context_->states.rbegin(); weak != context_->states.rend(); ++weak) {
    const auto state = weak->lock();
    if (state && state.get() != this && !state->yet_to_forward_.empty() &&
        state->running_.empty()) {
      state->yet_to_forward_.clear();
      hooks.push_back(state->complete_forward());
    }
  }
  comm_->release_parked();
  comm_->release_retired();
  context_->forward_root = nullptr;
  if (inside_backward()) {
    return hooks; // backward recomputes this forward, and needs what is gathered
  }
  for (const auto& weak : context_->states) {
    const auto state = weak.lock();
    if (!state) {
      continue;
    }
    for (const auto& group : state->groups_) {
      group->drop_unused_prefetch(); // it would be outdated after a step
      if (!at::GradMode::is_enabled()) {
        group->wait_for_host_copies(); // no backward will
      }
    }
  }
  if (!at::GradMode::is_enabled()) {
    compare_calls_of(*context_, *comm_); // else at the end of backward
  }
  return hooks;
}

void FSDPState::forward_failed(const void* module) {
  erase(running_, module);
  if (!initialized_ || in_backward()) {
    return; // the end of backward puts things right
  }
  if (context_->forward_root == this && running_.empty()) {
    // The gradients of earlier microbatches stay: they are not of this forward.
    reset_all(*context_, *comm_, /*drop_grads=*/false);
    return;
  }
  // The forward around this one may catch the error and go on.
  enter(TrainingState::Idle);
  yet_to_forward_.clear();
  for (const auto& group : groups_) {
    group->reshard(ReshardAfter::User);
  }
}

// Refuses the output if it is the module's own weight: its memory is about to be freed, or it is
// about to show the shard.
void FSDPState::check_outputs(const std::vector<at::Tensor*>& outputs) const {
  for (const auto* output : outputs) {
    if (!output->defined() || !output->has_storage()) {
      continue;
    }
    for (const auto& group : groups_) {
      for (const auto& param : group->params()) {
        const auto& whole = param->unsharded(); // all share one storage
        const auto offset = output->storage_offset() - whole.storage_offset();
        TORCH_CHECK(
            !output->is_same(param->tensor()) &&
                !(output->is_alias_of(whole) && offset >= 0 && offset < whole.numel()),
            "[fully_shard] the forward of ", module_text(name_), " returns its parameter '",
            param->name(), "' or a view of it, whose memory is freed afterwards; return a clone()");
      }
    }
  }
}

// ------------------------------------------------------------ Called by the user

void FSDPState::unshard() {
  check_updated();
  for (const auto& group : groups_) {
    group->unshard(UnshardFor::User);
  }
}

/// Called before anything that depends on how far the updates of a rank are. So either all ranks
/// throw or none.
void FSDPState::check_updated() const {
  for (const auto& group : groups_) {
    group->reducer().check_updated();
  }
}

void FSDPState::wait_for_unshard() {
  for (const auto& group : groups_) {
    group->wait_for_unshard(UnshardFor::User);
  }
}

void FSDPState::reshard() {
  TORCH_CHECK(
      training_state_ != TrainingState::PreBackward, "[fully_shard] ", module_text(name_),
      " was to be resharded, by reshard() or for a state dict, while its backward runs and needs "
      "its parameters; do that after backward");
  const bool inside_forward = training_state_ == TrainingState::Forward;
  check_updated();
  for (const auto& group : groups_) {
    group->reshard(inside_forward ? ReshardAfter::Forward : ReshardAfter::User);
  }
}

void FSDPState::reset() {
  TORCH_CHECK(
      !initialized_ || context_->states.front().lock().get() == this,
      "[fully_shard] reset_iter_state must be called on the root module, not on '", name_, "'");
  if (initialized_) {
    reset_all(*context_, *comm_, /*drop_grads=*/true);
  } else {
    for (const auto& group : groups_) {
      group->reset();
    }
  }
}

void FSDPState::reset_all(StateContext& context, CommContext& comm, bool drop_grads) {
  for (const auto& weak : context.states) {
    if (const auto state = weak.lock()) {
      state->enter(TrainingState::Idle);
      state->running_.clear();
      state->yet_to_forward_.clear();
      for (const auto& group : state->groups_) {
        group->reset();
        if (drop_grads) {
          group->reducer().drop_grads();
        }
      }
    }
  }
  comm.reset();
  context.forward_root = nullptr;
  context.final_callback_queued = false;
  context.creates_graph = false;
  context.graph_begin.clear();
}

ShardingPlan FSDPState::plan_of(const Subtree& tree) {
  ShardingPlan plan;
  std::unordered_map<const FSDPState*, size_t> first_group; // of a state that was seen
  std::vector<std::string> roots; // whose forward is not inside that of another one
  const auto is_root = [&](const std::string& name) {
    return std::none_of(roots.begin(), roots.end(), [&](const std::string& root) {
      return root.empty() || name.starts_with(root + ".");
    });
  };
  for (const auto& node : tree.nodes) {
    const auto& state = *node.state;
    const bool keeps = is_root(node.name) && state.auto_reshard_after_forward;
    if (is_root(node.name)) {
      roots.push_back(node.name);
    }
    const auto [seen, is_new] = first_group.emplace(&state, plan.groups.size());
    for (size_t i = 0; i < state.groups().size(); ++i) {
      if (is_new) {
        plan.groups.push_back(state.groups()[i]->plan());
        auto& group = plan.groups.back();
        group.module = node.name;
        if (keeps && group.all_gathers > 1) { // what forward gathers is kept
          group.all_gathers = 1;
          group.all_gather_bytes = group.gathered_bytes;
        }
      } else {
        plan.groups[seen->second + i].module += ", " + node.name;
      }
    }
  }
  return plan;
}

} // namespace fsdp::detail
