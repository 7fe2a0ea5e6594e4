#pragma once

#include <functional>
#include <utility>

#include <fsdp/hooked.h>
#include <fsdp/module_ref.h>

namespace fsdp {

/// Calls the forward of a module that was sharded with by_call: gathers its parameters before the
/// call and frees them after it. A module that is hooked or not sharded is called as
/// `holder(args...)` would call it.
template <class Contained, class... A>
auto call(const torch::nn::ModuleHolder<Contained>& holder, A&&... args) {
  const auto module = holder.ptr();
  return detail::run_forward_deduced(
      detail::call_site(*module),
      [&](auto&&... held) -> decltype(module->forward(std::forward<decltype(held)>(held)...)) {
        return module->forward(std::forward<decltype(held)>(held)...);
      },
      std::forward<A>(args)...);
}

/// Runs any member function, or any callable `method(impl, args...)`, with the hooks of a sharded
/// module, as if it were the module's forward. Example:
/// call_method(vit, &VisionTransformerImpl::forward_features, images)
template <class Contained, class Method, class... A>
auto call_method(const torch::nn::ModuleHolder<Contained>& holder, Method&& method, A&&... args) {
  const auto module = holder.ptr();
  return detail::run_forward_deduced(
      detail::call_site(*module),
      [&](auto&&... held) -> std::invoke_result_t<Method&, Contained&, decltype(held)...> {
        return std::invoke(method, *module, std::forward<decltype(held)>(held)...);
      },
      std::forward<A>(args)...);
}

} // namespace fsdp
