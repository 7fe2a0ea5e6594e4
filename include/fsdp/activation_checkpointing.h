#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include <fsdp/activation_checkpoint_options.h>
#include <fsdp/detail/recompute_scope.h>
#include <fsdp/detail/recomputed_call.h>
#include <fsdp/detail/repeatable.h>
#include <fsdp/export.h>
#include <fsdp/module_ref.h>

// The public names keep Python's word, "checkpoint". The library itself says "recompute", because a
// checkpoint is otherwise a model on disk.

namespace fsdp {

/// Calls a module (given as its holder or a shared_ptr) or a function, and returns the result.
/// Autograd does not keep the tensors that it saves during the call. When backward needs the
/// first of them, it makes the call again. This is torch.utils.checkpoint in its non-reentrant
/// form.
///
/// The arguments are kept until then: tensors as an operator saves them, other arguments as
/// copies. So an argument must not refer to memory elsewhere (ArrayRef, string_view). The module
/// must be alive in backward, and so must everything that the function refers to: a lambda should
/// capture by value. The second call draws the same random numbers as the first if they come from
/// torch's default generators.
template <class F, class... A>
auto checkpoint(const ActivationCheckpointOptions& options, F&& module_or_function, A&&... args) {
  static_assert(
      detail::can_repeat<detail::PassedType<A&&>...>,
      "fsdp::checkpoint keeps its arguments for a second call: give it ones that can be copied, "
      "and no ArrayRef, initializer_list or string_view, which would refer to what is gone by "
      "then");
  const auto again = detail::make_repeatable(std::forward<F>(module_or_function));
  if (!detail::RecomputeScope::needed()) {
    return again.template call<detail::PassedType<A&&>...>(
        static_cast<detail::PassedType<A&&>>(args)...);
  }
  using Call =
      detail::RepeatableCallOf<std::remove_const_t<decltype(again)>, detail::PassedType<A&&>...>;
  const detail::RecomputeScope scope(std::make_unique<Call>(again, args...), options);
  return again.template call<detail::PassedType<A&&>...>(
      static_cast<detail::PassedType<A&&>>(args)...);
}

template <class F, class... A>
  requires(!std::is_convertible_v<F, ActivationCheckpointOptions>)
auto checkpoint(F&& module_or_function, A&&... args) {
  return checkpoint(
      ActivationCheckpointOptions{}, std::forward<F>(module_or_function), std::forward<A>(args)...);
}

/// From now on backward recomputes every call of the module, as with Python's composable
/// `checkpoint(module)`. May be called before or after fully_shard. Backward runs the module's
/// own forward again, with its hooks. Throws ValueError if the module is not hooked (see
/// FSDP_MODULE) or has no forward.
FSDP_API void apply_activation_checkpointing(
    ModuleRef module, const ActivationCheckpointOptions& options = {});

/// Does the same for every module at and below `root` for which `choose` returns true. `name` is
/// relative to `root`; the name of `root` itself is "". Returns the number of modules chosen.
FSDP_API size_t apply_activation_checkpointing(
    ModuleRef root,
    const std::function<bool(const std::string& name, torch::nn::Module& module)>& choose,
    const ActivationCheckpointOptions& options = {});

} // namespace fsdp
