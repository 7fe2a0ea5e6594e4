#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include <fsdp/export.h>

namespace fsdp::detail {

class FSDPState;

/// One call of a sharded module's forward: pre-forward when made, post-forward
/// by `outputs`. Ends the call as if it had not been where that is not reached.
class FSDP_API ForwardScope {
 public:
  /// Whether a call of the module has to pass through a scope: it is sharded,
  /// and is not running already (a module inside itself).
  static bool needed(const std::shared_ptr<FSDPState>& state);

  explicit ForwardScope(std::shared_ptr<FSDPState> state);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  /// Both may replace the tensors by others of the same value.
  void inputs(const std::vector<at::Tensor*>& tensors);
  void outputs(const std::vector<at::Tensor*>& tensors);

 private:
  std::shared_ptr<FSDPState> state_;
  bool autocast_cache_;
  bool finished_ = false;
};

} // namespace fsdp::detail
