#include "state/fsdp_state.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "runtime/range.h"
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
    LookBelow look_below)
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
  return states_in(look_below_(/*with_tensors=*/false));
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

// ------------------------------------------------------------ Forward

bool FSDPState::is_running(const void* module) const {
  return contains(running_, module);
}

void FSDPState::pre_forward(const void* module) {
  running_.push_back(module);
  if (training_state_ == TrainingState::PreBackward) {
    // Recomputed in backward, which has gathered; but a backward through
    // another forward of this module may have freed since, or need nothing.
    entering_ = false;
    for (const auto& group : groups_) {
      group->unshard(/*async_op=*/false, /*for_recomputation=*/true);
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
    group->pre_forward(entering_);
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
  const Range range("root_pre_forward");
  context_->forward_root = this;
  if (has_streams(device_)) {
    // Hooks and callbacks run in the thread that calls backward.
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  }
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
    const Range range("inputs_to_device");
    for (auto* tensor : tensors) {
      if (tensor->defined()) {
        *tensor = tensor->to(device_);
      }
    }
  }
  // Also when backward recomputes: the same dtypes as before.
  if (precision.cast_forward_inputs && precision.param_dtype) {
    const Range range("cast_forward_inputs");
    cast_floating(tensors, *precision.param_dtype);
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
  end_forward(module, outputs);
  if (precision.output_dtype) {
    const Range range("cast_forward_outputs");
    cast_floating(outputs, *precision.output_dtype);
  }
}

void FSDPState::end_forward(const void* module, const std::vector<at::Tensor*>& outputs) {
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
        comm_->release_retired();
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
  comm_->release_retired();
  context_->forward_root = nullptr;
  context_->forward_checked = true;
  if (inside_backward()) {
    return hook; // recomputed: backward goes on with what it has
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
  return hook;
}

void FSDPState::forward_failed(const void* module) {
  erase(running_, module);
  if (!initialized_ || training_state_ == TrainingState::PreBackward) {
    return; // the end of backward puts things right
  }
  if (context_->forward_root == this && running_.empty()) {
    // What earlier microbatches have accumulated is not of this forward.
    reset_all(*context_, *comm_, /*drop_grads=*/false);
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
        const auto& whole = param->unsharded(); // all share one storage
        const auto offset = output->storage_offset() - whole.storage_offset();
        TORCH_CHECK(
            !output->is_same(param->tensor()) &&
                !(output->is_alias_of(whole) && offset >= 0 && offset < whole.numel()),
            "[fully_shard] the forward of '", name_, "' returns its parameter '", param->name(),
            "' or a view of it, whose memory is freed afterwards; return a clone()");
      }
    }
  }
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
      state->training_state_ = TrainingState::Idle;
      state->yet_to_forward_.clear();
      for (const auto& group : state->groups_) {
        group->reset();
        if (drop_grads) {
          group->drop_grads();
        }
      }
    }
  }
  comm.reset();
  context.forward_root = nullptr;
  context.final_callback_queued = false;
}

} // namespace fsdp::detail
