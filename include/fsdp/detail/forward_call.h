#pragma once

// Runs a module's forward between its hooks. Users write a hooked module (hooked.h) or fsdp::call
// (call.h), and need nothing from this file.

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <fsdp/detail/forward_scope.h>
#include <fsdp/detail/recomputed_call.h>
#include <fsdp/tree.h>

namespace fsdp::detail {

// An argument that holds tensors and is taken by value, const& or && is copied, so that its
// tensors can be replaced. A non-const T& is passed through, because the module may write to it.
template <class P>
inline constexpr bool kCopied =
    HasTree<std::remove_cvref_t<P>> &&
    (!std::is_lvalue_reference_v<P> || std::is_const_v<std::remove_reference_t<P>>);
template <class P>
using HeldArgument = std::conditional_t<kCopied<P>, std::remove_cvref_t<P>, P&&>;
// A result that holds tensors is returned by value, because its tensors may be replaced.
template <class R>
using Result = std::conditional_t<HasTree<std::remove_cvref_t<R>>, std::remove_cvref_t<R>, R>;

template <class T>
void collect(T& value, std::vector<at::Tensor*>& tensors) {
  visit_tensors(value, [&](at::Tensor& tensor) { tensors.push_back(&tensor); });
}

/// A call by fsdp::call. It has the sharding state only: a hooked module's forward adds its hooks.
FSDP_API CallSite call_site(const torch::nn::Module& module);
/// A call by which backward recomputes a forward. It runs the module's hooks, and is not recomputed
/// again.
FSDP_API CallSite recomputation_site(const torch::nn::Module& module);

template <class... P, class Body>
auto run_forward(const CallSite& site, const Body& body, P&&... args)
    -> Result<std::invoke_result_t<const Body&, P...>>;

/// Makes the same call again for a recomputation. The hooks run again, as in Python.
template <class Body>
class RepeatableForward {
 public:
  RepeatableForward(const torch::nn::Module& module, const Body& body)
      : module_(module), body_(body) {}
  std::string name() const {
    return module_.name();
  }
  template <class... P>
  void call(P&&... args) const {
    const auto module = module_.lock();
    run_forward<P...>(recomputation_site(*module), body_, static_cast<P&&>(args)...);
  }

 private:
  WeakModule module_;
  Body body_;
};

/// Runs `call(args...)`. The scope gets the tensors of the inputs before it and of the outputs
/// after it.
template <class... P, class Scope, class Call>
auto run_in_scope(Scope& scope, const Call& call, P&&... args)
    -> Result<std::invoke_result_t<const Call&, P...>> {
  using R = Result<std::invoke_result_t<const Call&, P...>>;
  std::tuple<HeldArgument<P>...> held(static_cast<P&&>(args)...);
  std::vector<at::Tensor*> tensors;
  const auto run = [&]<size_t... I>(std::index_sequence<I...>) -> R {
    (
        [&] {
          if constexpr (kCopied<P>) {
            collect(std::get<I>(held), tensors);
          }
        }(),
        ...);
    scope.inputs(tensors);
    return call(static_cast<P&&>(std::get<I>(held))...);
  };
  if constexpr (std::is_void_v<R>) {
    run(std::index_sequence_for<P...>{});
    scope.outputs({});
  } else {
    R result = run(std::index_sequence_for<P...>{});
    tensors.clear();
    if constexpr (HasTree<std::remove_cvref_t<R>>) {
      collect(result, tensors);
    }
    scope.outputs(tensors);
    return static_cast<R&&>(result);
  }
}

/// Runs `body(args...)` with the module's hooks, if it has any.
template <class... P, class Body>
auto run_hooked(const CallSite& site, const Body& body, P&&... args)
    -> Result<std::invoke_result_t<const Body&, P...>> {
  if (!site.has_hooks()) {
    return body(static_cast<P&&>(args)...);
  }
  HookScope scope(*site.hooks);
  return run_in_scope<P...>(scope, body, static_cast<P&&>(args)...);
}

/// The same, in a RecomputeScope if backward recomputes the module's calls.
template <class... P, class Body>
auto run_recomputed(const CallSite& site, const Body& body, P&&... args)
    -> Result<std::invoke_result_t<const Body&, P...>> {
  if (site.recompute && RecomputeScope::needed()) {
    const auto& module = *static_cast<const torch::nn::Module*>(site.module);
    if constexpr (can_repeat<P...>) {
      using Call = RepeatableCallOf<RepeatableForward<Body>, P...>;
      const RecomputeScope scope(
          std::make_unique<Call>(RepeatableForward<Body>(module, body), args...), *site.recompute);
      return run_hooked<P...>(site, body, static_cast<P&&>(args)...);
    } else {
      refuse_arguments(module);
    }
  }
  return run_hooked<P...>(site, body, static_cast<P&&>(args)...);
}

/// Runs `body(args...)` as a forward of the module, between pre-forward and post-forward. P are
/// the parameter types of the callee.
template <class... P, class Body>
auto run_forward(const CallSite& site, const Body& body, P&&... args)
    -> Result<std::invoke_result_t<const Body&, P...>> {
  using R = Result<std::invoke_result_t<const Body&, P...>>;
  static_assert(
      HasTree<std::remove_cvref_t<R>> || tensor_free<std::remove_cvref_t<R>>,
      "fsdp: cannot find the tensors in what forward returns: write FSDP_TREE(Type, members...) "
      "or specialise fsdp::Tree<Type>");
  if (!ForwardScope::needed(site)) {
    return run_recomputed<P...>(site, body, static_cast<P&&>(args)...);
  }
  ForwardScope scope(site);
  const auto call = [&](P&&... held) -> R {
    return run_recomputed<P...>(site, body, static_cast<P&&>(held)...);
  };
  return run_in_scope<P...>(scope, call, static_cast<P&&>(args)...);
}

// If the callee's parameter types are not known (overloads, templates), an lvalue that holds
// tensors is passed as const&, provided that this compiles.
template <class A>
using AsConst = std::conditional_t<
    std::is_lvalue_reference_v<A> && HasTree<std::remove_cvref_t<A>>,
    const std::remove_cvref_t<A>&,
    A>;

template <class Body, class... A>
auto run_forward_deduced(const CallSite& site, const Body& body, A&&... args) {
  if constexpr (std::is_invocable_v<const Body&, AsConst<A&&>...>) {
    return run_forward<AsConst<A&&>...>(site, body, static_cast<AsConst<A&&>>(args)...);
  } else {
    return run_forward<A&&...>(site, body, std::forward<A>(args)...);
  }
}

} // namespace fsdp::detail
