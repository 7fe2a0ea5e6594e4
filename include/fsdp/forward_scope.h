#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/checkpoint_scope.h>
#include <fsdp/export.h>

namespace fsdp::detail {

class FSDPState;
class BypassCheck;

/// What runs around a module's forward, inside of what fully_shard and
/// checkpointing do there: a style of parallelize_module.
struct ForwardHook {
  using Tensors = std::vector<at::Tensor*>;
  using AtOutputs = std::function<void(const Tensors& outputs)>;

  std::string name;
  bool divides = false; // the module's parameters, too: not only inputs and outputs
  /// Given the inputs of each call. What it returns, if anything, is given the
  /// outputs, and destroyed when the call has ended, by an exception too. Both
  /// may replace the tensors.
  std::function<AtOutputs(const Tensors& inputs)> begin = {};
  std::shared_ptr<const void> keeps = {}; // for as long as the module lives
};

/// Which module is called; its state, none where it is not sharded; what else
/// runs around it; and whether its calls are checkpointed.
struct CallSite {
  std::shared_ptr<FSDPState> state;
  const void* module;
  const std::vector<ForwardHook>* hooks = nullptr;
  std::optional<ActivationCheckpointOptions> checkpoint = {};

  bool has_hooks() const {
    return hooks && !hooks->empty();
  }
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

  /// Both may replace the tensors.
  void inputs(const std::vector<at::Tensor*>& tensors);
  void outputs(const std::vector<at::Tensor*>& tensors);

 private:
  bool ended_early();

  const CallSite site_;
  const bool autocast_cache_;
  bool finished_ = false;
  std::unique_ptr<BypassCheck> check_;
};

/// The same of a module's hooks.
class FSDP_API HookScope {
 public:
  explicit HookScope(const std::vector<ForwardHook>& hooks) : hooks_(hooks) {}

  void inputs(const std::vector<at::Tensor*>& tensors);
  void outputs(const std::vector<at::Tensor*>& tensors);

 private:
  const std::vector<ForwardHook>& hooks_;
  std::vector<ForwardHook::AtOutputs> at_outputs_;
};

} // namespace fsdp::detail
