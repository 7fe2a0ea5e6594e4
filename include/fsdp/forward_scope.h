#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/export.h>

namespace fsdp::detail {

class FSDPState;
class BypassCheck;

/// What runs around a module's forward, inside of what fully_shard does there:
/// a style of parallelize_module.
struct ForwardHook {
  using Tensors = std::vector<at::Tensor*>;
  using AtOutputs = std::function<void(const Tensors& outputs)>;

  std::string name;
  /// Given the inputs of each call. What it returns, if anything, is given the
  /// outputs, and destroyed when the call has ended, by an exception too. Both
  /// may replace the tensors.
  std::function<AtOutputs(const Tensors& inputs)> begin = {};
  std::shared_ptr<const void> keeps = {}; // for as long as the module lives
};

/// Which module is called, and its state: none where it is not sharded.
struct CallSite {
  std::shared_ptr<FSDPState> state;
  const void* module;
  const std::vector<ForwardHook>* hooks = nullptr;
};

/// One call of a hooked module's forward: pre-forward when made, post-forward
/// by `outputs`. Ends the call as if it had not been where that is not reached.
class FSDP_API ForwardScope {
 public:
  /// Whether a call of the module has to pass through a scope: it is sharded,
  /// and is not running already (a module inside itself), or it has hooks.
  static bool needed(const CallSite& site);

  explicit ForwardScope(CallSite site);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  /// Both may replace the tensors.
  void inputs(const std::vector<at::Tensor*>& tensors);
  void outputs(const std::vector<at::Tensor*>& tensors);

 private:
  CallSite site_;
  const bool autocast_cache_;
  bool finished_ = false;
  std::unique_ptr<BypassCheck> check_;
  std::vector<ForwardHook::AtOutputs> at_outputs_;
};

} // namespace fsdp::detail
