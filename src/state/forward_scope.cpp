#include <fsdp/forward_scope.h>

#include <ATen/autocast_mode.h>

#include <utility>

#include "state/bypass_check.h"
#include "state/fsdp_state.h"

namespace fsdp::detail {

bool ForwardScope::needed(const CallSite& site) {
  return (site.state && !site.state->is_running(site.module)) ||
         (site.hooks && !site.hooks->empty());
}

ForwardScope::ForwardScope(CallSite site)
    : site_(std::move(site)), autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
  if (!site_.state || site_.state->is_running(site_.module)) {
    site_.state = nullptr; // the hooks alone
    return;
  }
  // Autocast remembers casts of weights by their TensorImpl, which stays the
  // same while its content changes.
  at::autocast::set_autocast_cache_enabled(false);
  try {
    site_.state->pre_forward(site_.module);
  } catch (...) {
    site_.state->forward_failed(site_.module);
    at::autocast::set_autocast_cache_enabled(autocast_cache_);
    throw;
  }
  if (site_.state->is_unchecked_root()) {
    check_ = std::make_unique<BypassCheck>();
  }
}

ForwardScope::~ForwardScope() {
  at_outputs_.clear();
  if (!site_.state) {
    return;
  }
  if (!finished_) {
    site_.state->forward_failed(site_.module);
  }
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
}

void ForwardScope::inputs(const std::vector<at::Tensor*>& tensors) {
  if (site_.state) {
    site_.state->replace_inputs(tensors);
  }
  if (!site_.hooks) {
    return;
  }
  for (const auto& hook : *site_.hooks) {
    if (auto at_outputs = hook.begin ? hook.begin(tensors) : nullptr) {
      at_outputs_.push_back(std::move(at_outputs));
    }
  }
}

void ForwardScope::outputs(const std::vector<at::Tensor*>& tensors) {
  check_.reset();
  for (const auto& at_outputs : at_outputs_) {
    at_outputs(tensors);
  }
  at_outputs_.clear();
  if (site_.state) {
    site_.state->post_forward(site_.module, tensors);
  }
  finished_ = true;
}

} // namespace fsdp::detail
