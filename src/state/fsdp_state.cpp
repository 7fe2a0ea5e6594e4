#include "state/fsdp_state.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/text.h"
#include "state/autograd_hooks.h"

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

} // namespace

FSDPState::FSDPState(
    std::string name,
    std::vector<const void*> modules,
    c10::Device device,
    Groups groups,
    std::function<Subtree()> look_below)
    : name_(std::move(name)),
      modules_(std::move(modules)),
      device_(device),
      groups_(std::move(groups)),
      look_below_(std::move(look_below)) {
  for (const auto& group : groups_) {
    group->comm = comm_;
  }
}

std::vector<std::shared_ptr<FSDPState>> FSDPState::states_below() const {
  std::vector<std::shared_ptr<FSDPState>> states;
  for (const auto& node : look_below_().nodes) {
    if (std::find(states.begin(), states.end(), node.state) == states.end()) {
      states.push_back(node.state);
    }
  }
  return states;
}

// ------------------------------------------------------------ Lazy init

// The first module whose forward runs is the root of all that is below it. What
// can be wrong is found before anything is changed.
void FSDPState::lazy_init() {
  TORCH_CHECK(
      modules_.size() == 1, "[fully_shard] requires a single root module, but '", name_,
      "' is one group of ", modules_.size(),
      " modules; call fully_shard on the module that contains them too, and run that one");
  const auto below = look_below_();
  for (const auto& node : below.nodes) {
    TORCH_CHECK(
        node.state.get() == this || !node.state->initialized_,
        "[fully_shard] state has already been lazily initialized for ", node.name,
        ", because its forward ran before that of '", name_,
        "', which contains it; requires running forward through the root module first");
  }
  const auto states = states_below();
  set_names(below);
  for (const auto& state : states) {
    for (const auto& group : state->groups_) {
      group->lazy_init();
    }
  }
  for (const auto& state : states) {
    context_->states.push_back(state);
    state->context_ = context_;
    state->comm_ = comm_;
    state->initialized_ = true;
    for (const auto& group : state->groups_) {
      group->comm = comm_;
      comm_->max_input_buffers = std::max(comm_->max_input_buffers, group->max_input_buffers);
    }
  }
  comm_->lazy_init(device_);
  if (has_streams(device_)) {
    // Hooks and callbacks run in the thread that calls backward.
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  }
  if (auto_reshard_after_forward) {
    // Its backward begins at once: it would be freed only to be gathered.
    for (const auto& group : groups_) {
      group->set_post_forward_ranks(0);
    }
  }
}

void FSDPState::set_names(const Subtree& below) {
  std::unordered_set<const FSDPState*> named;
  for (const auto& node : below.nodes) {
    auto& state = *node.state;
    state.name_ = named.insert(&state).second ? node.name : state.name_ + ", " + node.name;
  }
  for (const auto& node : below.nodes) {
    for (const auto& group : node.state->groups_) {
      group->set_name(node.state->name_);
    }
  }
  std::unordered_set<const at::TensorImpl*> ignored;
  for (const auto& node : below.nodes) {
    for (const auto& param : node.state->ignored_params) {
      ignored.insert(param.unsafeGetTensorImpl());
    }
  }
  std::unordered_set<const at::TensorImpl*> seen;
  std::vector<std::string> unmanaged;
  for (const auto& [name, tensor] : below.params) {
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) {
      continue; // shared: the first name counts
    }
    if (auto* param = FSDPParam::find(tensor)) {
      param->set_name(name);
    } else if (!ignored.count(tensor.unsafeGetTensorImpl()) && tensor.requires_grad()) {
      unmanaged.push_back(name);
    }
  }
  if (!unmanaged.empty()) {
    TORCH_WARN(
        "[fully_shard] these parameters appeared after fully_shard and are not sharded; their "
        "gradients are not reduced: ",
        join(unmanaged));
  }
}

void FSDPState::share_comm(const FSDPState& first) {
  for (const auto& state : states_below()) {
    state->comm_ = first.comm_;
    for (const auto& group : state->groups_) {
      group->comm = first.comm_;
    }
  }
}

// ------------------------------------------------------------ Forward

bool FSDPState::is_running(const void* module) const {
  return contains(running_, module);
}

void FSDPState::pre_forward(const void* module) {
  running_.push_back(module);
  if (training_state_ == TrainingState::PreBackward) {
    // Recomputed in backward, which has gathered; but a backward through
    // another forward of this module may have freed since.
    entering_ = false;
    for (const auto& group : groups_) {
      group->unshard();
      group->wait_for_unshard();
    }
    return;
  }
  if (!initialized_) {
    lazy_init();
  }
  entering_ = training_state_ != TrainingState::Forward || !context_->forward_root;
  training_state_ = TrainingState::Forward;
  if (!context_->forward_root) {
    begin_root_forward();
  }
  if (modules_.size() > 1 && yet_to_forward_.empty()) {
    yet_to_forward_ = modules_;
  }
  for (const auto& group : groups_) {
    group->pre_forward();
  }
  if (entering_) {
    for (const auto& weak : forward_prefetch) {
      if (const auto next = weak.lock()) {
        for (const auto& group : next->groups_) {
          group->prefetch(TrainingState::Forward);
        }
      }
    }
  }
}

// The outermost forward, which need not be the root's: gathers see what the
// optimizer has written.
void FSDPState::begin_root_forward() {
  context_->forward_root = this;
  if (context_->post_optim_event) {
    comm_->gather_after(*context_->post_optim_event);
    context_->post_optim_event.reset();
  } else {
    comm_->gather_after(StreamEvent::of(optional_current_stream(device_)));
  }
}

bool FSDPState::is_unchecked_root() const {
  return context_->forward_root == this && !context_->forward_checked && running_.size() == 1;
}

void FSDPState::replace_inputs(const std::vector<at::Tensor*>& tensors) {
  if (has_streams(device_) && context_->forward_root == this) {
    for (auto* tensor : tensors) {
      if (tensor->defined()) {
        *tensor = tensor->to(device_);
      }
    }
  }
  if (entering_ && !groups_.empty()) {
    call_after_gradients(tensors, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) {
        self->post_backward();
      }
    });
  }
}

void FSDPState::post_forward(const void* module, const std::vector<at::Tensor*>& outputs) {
  erase(running_, module);
  check_outputs(outputs);
  if (training_state_ == TrainingState::PreBackward) {
    return;
  }
  const bool is_root = context_->forward_root == this && running_.empty();
  if (modules_.size() > 1) {
    const bool is_new = contains(yet_to_forward_, module);
    erase(yet_to_forward_, module);
    if (!is_new || !yet_to_forward_.empty()) {
      if (is_root) {
        // One of several modules, called by itself (a loss head in chunks): its
        // parameters stay until its own backward.
        yet_to_forward_.clear();
        context_->forward_root = nullptr;
        if (at::GradMode::is_enabled()) {
          call_at_each_gradient(outputs, backward_hook(/*partial=*/true));
        } else {
          complete_forward();
        }
      }
      return;
    }
  }
  auto hook = complete_forward();
  call_at_each_gradient(outputs, is_root ? end_root_forward(std::move(hook)) : std::move(hook));
}

std::function<void()> FSDPState::complete_forward() {
  const bool recomputed = inside_backward();
  for (const auto& group : groups_) {
    if (!recomputed) {
      group->post_forward();
    }
    group->training_state = TrainingState::Idle;
  }
  training_state_ = TrainingState::Idle;
  return backward_hook(/*partial=*/false);
}

std::function<void()> FSDPState::end_root_forward(std::function<void()> hook) {
  // Groups of several modules that did not all run: their backward begins with
  // that of the whole, for all we know.
  for (auto weak = context_->states.rbegin(); weak != context_->states.rend(); ++weak) {
    const auto state = weak->lock();
    if (state && state.get() != this && !state->yet_to_forward_.empty() &&
        state->running_.empty()) {
      state->yet_to_forward_.clear();
      hook = [first = std::move(hook), then = state->complete_forward()] {
        first();
        then();
      };
    }
  }
  comm_->release_parked();
  context_->forward_root = nullptr;
  context_->forward_checked = true;
  if (!at::GradMode::is_enabled() && !inside_backward()) {
    // What was prefetched and not used would be outdated after a step.
    for (const auto& weak : context_->states) {
      if (const auto state = weak.lock()) {
        for (const auto& group : state->groups_) {
          group->drop_pending();
        }
      }
    }
  }
  return hook;
}

void FSDPState::forward_failed(const void* module) {
  erase(running_, module);
  if (!initialized_ || training_state_ == TrainingState::PreBackward) {
    return; // the end of backward puts things right
  }
  if (context_->forward_root == this && running_.empty()) {
    reset_all(*context_, *comm_);
    return;
  }
  // Somebody inside the outermost forward may go on.
  training_state_ = TrainingState::Idle;
  yet_to_forward_.clear();
  for (const auto& group : groups_) {
    group->training_state = TrainingState::Idle;
    group->reshard();
  }
}

// A module that returns its own weight would hand out memory that is about to
// be freed, or a tensor that is about to show the shard.
void FSDPState::check_outputs(const std::vector<at::Tensor*>& outputs) const {
  for (const auto* output : outputs) {
    if (!output->defined() || !output->has_storage()) {
      continue;
    }
    for (const auto& group : groups_) {
      for (const auto& param : group->params()) {
        TORCH_CHECK(
            !output->is_same(param->tensor()) && !output->is_alias_of(param->unsharded()),
            "[fully_shard] the forward of '", name_, "' returns its parameter '", param->name(),
            "' or a view of it, whose memory is freed afterwards; return a clone()");
      }
    }
  }
}

// ------------------------------------------------------------ Backward

uint64_t FSDPState::shard_version() const {
  uint64_t sum = 0;
  for (const auto& group : groups_) {
    sum += group->shard_version();
  }
  return sum;
}

/// What is to be called when a gradient of an output arrives.
std::function<void()> FSDPState::backward_hook(bool partial) {
  if (!at::GradMode::is_enabled()) {
    return [] {};
  }
  auto record = std::make_shared<ForwardRecord>();
  if (!partial && !groups_.empty() && !inside_backward()) {
    record->groups.assign(groups_.begin(), groups_.end());
    comm_->record_forward(record);
  }
  return [weak = weak_from_this(), record, version = shard_version(), partial] {
    if (const auto self = weak.lock()) {
      self->pre_backward(*record, version, partial);
    }
  };
}

void FSDPState::pre_backward(const ForwardRecord& record, uint64_t version, bool partial) {
  TORCH_CHECK(
      version == shard_version(), "[fully_shard] parameters of '", name_,
      "' were modified (an optimizer step, for example) between its forward and its backward, "
      "which would compute gradients of something else; run forward again after the step");
  if (partial) {
    queue_partial_callback();
  } else {
    queue_final_callback();
  }
  training_state_ = TrainingState::PreBackward;
  bool begins = false;
  for (const auto& group : groups_) {
    begins |= group->pre_backward();
  }
  if (begins) {
    prefetch_for_backward(record);
  }
}

// In reverse order of the forwards, as backward most likely goes, or as told.
void FSDPState::prefetch_for_backward(const ForwardRecord& record) {
  std::vector<std::shared_ptr<FSDPParamGroup>> next;
  for (const auto& weak : backward_prefetch) {
    if (const auto state = weak.lock()) {
      next.insert(next.end(), state->groups_.rbegin(), state->groups_.rend());
    }
  }
  if (backward_prefetch.empty()) {
    if (const auto before = comm_->forward_before(record)) {
      for (auto weak = before->groups.rbegin(); weak != before->groups.rend(); ++weak) {
        next.push_back(weak->lock());
      }
    }
  }
  for (const auto& group : next) {
    if (group) {
      group->prefetch(TrainingState::PreBackward);
    }
  }
}

void FSDPState::post_backward() {
  for (auto group = groups_.rbegin(); group != groups_.rend(); ++group) {
    (*group)->post_backward();
  }
}

void FSDPState::queue_final_callback() {
  if (context_->final_callback_queued) {
    return;
  }
  context_->final_callback_queued = true;
  at_end_of_backward(
      [context = context_, comm = comm_] { finish_backward(*context, *comm); },
      [context = context_, comm = comm_] { reset_all(*context, *comm); });
}

// The backward of one of several modules that was called by itself ends for
// this state alone; the others' is still to come.
void FSDPState::queue_partial_callback() {
  if (context_->final_callback_queued || training_state_ == TrainingState::PreBackward) {
    return;
  }
  at_end_of_backward(
      [weak = weak_from_this()] {
        if (const auto self = weak.lock()) {
          for (const auto& group : self->groups_) {
            if (group->training_state != TrainingState::PostBackward) {
              group->post_backward();
            }
          }
          self->comm_->finish_reductions(0);
          self->training_state_ = TrainingState::Idle;
          for (const auto& group : self->groups_) {
            group->end_backward(self->context_->is_last_backward);
          }
        }
      },
      [context = context_, comm = comm_] { reset_all(*context, *comm); });
}

void FSDPState::finish_backward(StateContext& context, CommContext& comm) {
  std::vector<std::shared_ptr<FSDPState>> states;
  for (const auto& weak : context.states) {
    if (auto state = weak.lock()) {
      states.push_back(std::move(state));
    }
  }
  for (const auto& state : states) {
    state->yet_to_forward_.clear();
    state->training_state_ = TrainingState::Idle;
    for (auto it = state->groups_.rbegin(); it != state->groups_.rend(); ++it) {
      // Inputs that need no gradient, modules that were not used, and gradients
      // that came after post-backward (a weight used elsewhere too).
      auto& group = **it;
      const bool late = group.reduce_grads && group.has_unsharded_grads();
      if (group.training_state != TrainingState::PostBackward || late) {
        group.post_backward();
      }
    }
  }
  comm.finish_reductions(0);
  for (const auto& state : states) {
    for (const auto& group : state->groups_) {
      group->end_backward(context.is_last_backward);
    }
  }
  if (context.is_last_backward) {
    comm.forget_forwards();
  }
  context.final_callback_queued = false;
}

// ------------------------------------------------------------ Called by the user

void FSDPState::unshard(bool async_op) {
  for (const auto& group : groups_) {
    group->unshard(async_op);
  }
}

void FSDPState::wait_for_unshard() {
  for (const auto& group : groups_) {
    group->wait_for_unshard();
  }
}

void FSDPState::reshard() {
  for (const auto& group : groups_) {
    group->reshard();
  }
}

void FSDPState::reset() {
  TORCH_CHECK(
      !initialized_ || context_->states.front().lock().get() == this,
      "[fully_shard] reset_iter_state must be called on the root module, not on '", name_, "'");
  if (initialized_) {
    reset_all(*context_, *comm_);
  } else {
    for (const auto& group : groups_) {
      group->reset();
    }
  }
}

void FSDPState::reset_all(StateContext& context, CommContext& comm) {
  for (const auto& weak : context.states) {
    if (const auto state = weak.lock()) {
      state->training_state_ = TrainingState::Idle;
      state->yet_to_forward_.clear();
      for (const auto& group : state->groups_) {
        group->reset();
      }
    }
  }
  comm.reset();
  context.forward_root = nullptr;
  context.final_callback_queued = false;
}

} // namespace fsdp::detail
