#include <fsdp/detail/forward_scope.h>

#include <ATen/autocast_mode.h>

#include <utility>

#include "param/shard_guard.h"
#include "state/fsdp_state.h"

namespace fsdp::detail {

bool ForwardScope::needed(const CallSite& site) {
  return site.state && !site.state->is_running(site.module);
}

ForwardScope::ForwardScope(CallSite site)
    : site_(std::move(site)), autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
  // Autocast remembers casts of weights by their TensorImpl, which stays the same while its content
  // changes.
  at::autocast::set_autocast_cache_enabled(false);
  try {
    begins_ = site_.state->pre_forward(site_.module);
  } catch (...) {
    site_.state->forward_failed(site_.module);
    at::autocast::set_autocast_cache_enabled(autocast_cache_);
    throw;
  }
  enter_forward();
  in_forward_ = true;
}

ForwardScope::~ForwardScope() {
  leave();
  if (!finished_ && !(RecomputeScope::stopping() && ended_early())) {
    try {
      site_.state->forward_failed(site_.module);
    } catch (const std::exception&) { // the first error is on its way
    }
  }
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
}

void ForwardScope::leave() {
  if (std::exchange(in_forward_, false)) {
    leave_forward();
  }
}

/// Ends the call normally, without outputs. Returns false if that throws.
bool ForwardScope::ended_early() {
  try {
    outputs({});
  } catch (...) {
    return false;
  }
  return true;
}

void ForwardScope::inputs(const std::vector<at::Tensor*>& tensors) {
  site_.state->replace_inputs(tensors, begins_);
}

void ForwardScope::outputs(const std::vector<at::Tensor*>& tensors) {
  leave();
  site_.state->post_forward(site_.module, tensors);
  finished_ = true;
}

void HookScope::inputs(const std::vector<at::Tensor*>& tensors) {
  for (const auto& hook : hooks_) {
    if (auto at_outputs = hook.begin ? hook.begin(tensors) : nullptr) {
      at_outputs_.push_back(std::move(at_outputs));
    }
  }
}

void HookScope::outputs(const std::vector<at::Tensor*>& tensors) {
  for (const auto& at_outputs : at_outputs_) {
    at_outputs(tensors);
  }
}

} // namespace fsdp::detail
