#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/detail/recompute_scope.h>
#include <fsdp/export.h>

namespace fsdp::detail {

class FSDPState;

/// Code that a style of parallelize_module runs around a module's forward. It runs inside the
/// code of fully_shard and of recomputation.
struct ForwardHook {
  using Tensors = std::vector<at::Tensor*>;
  using AtOutputs = std::function<void(const Tensors& outputs)>;

  std::string name;
  bool divides_params = false; // whether the style divides parameters, too
  /// Gets the inputs of each call. The function that it returns, if any, gets the outputs, and is
  /// destroyed when the call ends, also by an exception. Both functions may replace the tensors.
  std::function<AtOutputs(const Tensors& inputs)> begin = {};
  std::shared_ptr<const void> keeps = {}; // an object that lives as long as the module
};

/// A call of a module: its sharding state (null if it is not sharded), its hooks, and its options
/// for recomputation, if backward recomputes it.
struct CallSite {
  std::shared_ptr<FSDPState> state;
  const void* module;
  const std::vector<ForwardHook>* hooks = nullptr;
  std::optional<ActivationCheckpointOptions> recompute = {};

  bool has_hooks() const {
    return hooks && !hooks->empty();
  }
};

/// One call of a sharded module's forward. The constructor runs pre-forward, `outputs` runs
/// post-forward. If `outputs` is never called because the forward threw, the destructor undoes
/// the call. A recomputation that stopped early is not an error: its call ends normally.
class FSDP_API ForwardScope {
 public:
  /// Returns true if a call of the module needs a scope: the module is sharded, and this call is
  /// not made from inside its own forward.
  static bool needed(const CallSite& site);

  explicit ForwardScope(CallSite site);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  /// Both functions may replace the tensors.
  void inputs(const std::vector<at::Tensor*>& tensors);
  void outputs(const std::vector<at::Tensor*>& tensors);

 private:
  bool ended_early();
  void leave();

  const CallSite site_;
  const bool autocast_cache_;
  bool begins_ = false; // see FSDPState::pre_forward
  bool finished_ = false;
  bool in_forward_ = false;
};

/// Runs a module's hooks around one call. `inputs` calls `begin` of each hook, and `outputs` calls
/// the functions that `begin` returned.
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
