#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <fsdp/detail/forward_scope.h>
#include <fsdp/export.h>

namespace fsdp {

/// The base class of every hooked module. It holds what fully_shard, parallelize_module and
/// apply_activation_checkpointing attach to the module. A copy of a sharded module is not
/// sharded. A copy of a module whose calls backward recomputes keeps these options.
class FSDP_API Hookable {
 public:
  virtual ~Hookable() = default;
  /// False for a container such as ModuleList, which has no forward to intercept.
  virtual bool fsdp_has_forward() const = 0;
  std::shared_ptr<detail::FSDPState> fsdp_state; // null until fully_shard
  std::vector<detail::ForwardHook> fsdp_hooks;   // empty until parallelize_module
  /// Set by apply_activation_checkpointing.
  std::optional<ActivationCheckpointOptions> fsdp_recompute;

 protected:
  Hookable() = default;
  Hookable(const Hookable& other) noexcept : fsdp_recompute(other.fsdp_recompute) {}
  Hookable& operator=(const Hookable&) noexcept {
    return *this;
  }
};

} // namespace fsdp
