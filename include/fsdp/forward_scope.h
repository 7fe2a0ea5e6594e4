#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include <fsdp/checkpoint_scope.h>
#include <fsdp/export.h>

namespace fsdp::detail {

class FSDPState;
class BypassCheck;

/// Which module is called; its state, none where it is not sharded; and whether
/// its calls are checkpointed.
struct CallSite {
  std::shared_ptr<FSDPState> state;
  const void* module;
  std::optional<ActivationCheckpointOptions> checkpoint = {};
};

/// One call of a sharded module's forward: pre-forward when made, post-forward
/// by `outputs`. Ends the call as if it had not been where that is not reached,
/// except where that is because a recomputation needs no more of it.
class FSDP_API ForwardScope {
 public:
  /// Whether a call of the module has to pass through a scope: it is sharded,
  /// and is not running already (a module inside itself).
  static bool needed(const CallSite& site);

  explicit ForwardScope(CallSite site);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  /// Both may replace the tensors by others of the same value.
  void inputs(const std::vector<at::Tensor*>& tensors);
  void outputs(const std::vector<at::Tensor*>& tensors);

 private:
  bool ended_early();

  const CallSite site_;
  const bool autocast_cache_;
  bool finished_ = false;
  std::unique_ptr<BypassCheck> check_;
};

} // namespace fsdp::detail
