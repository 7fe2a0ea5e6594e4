#include <fsdp/forward_scope.h>

#include <ATen/autocast_mode.h>

#include <utility>

#include "state/fsdp_state.h"

namespace fsdp::detail {

bool ForwardScope::needed(const std::shared_ptr<FSDPState>& state) {
  return state && !state->in_forward();
}

ForwardScope::ForwardScope(std::shared_ptr<FSDPState> state)
    : state_(std::move(state)), autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
  // Autocast remembers casts of weights by their TensorImpl, which stays the
  // same while its content changes.
  at::autocast::set_autocast_cache_enabled(false);
  try {
    state_->pre_forward();
  } catch (...) {
    state_->forward_failed();
    at::autocast::set_autocast_cache_enabled(autocast_cache_);
    throw;
  }
}

ForwardScope::~ForwardScope() {
  if (!finished_) {
    state_->forward_failed();
  }
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
}

void ForwardScope::inputs(const std::vector<at::Tensor*>& tensors) {
  state_->replace_inputs(tensors);
}

void ForwardScope::outputs(const std::vector<at::Tensor*>& tensors) {
  state_->post_forward(tensors);
  finished_ = true;
}

} // namespace fsdp::detail
