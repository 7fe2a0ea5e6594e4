#pragma once

// A module or a function in the form in which backward can call it again.

#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include <fsdp/call.h>
#include <fsdp/detail/recompute_scope.h>
#include <fsdp/detail/recomputed_call.h>
#include <fsdp/hookable.h>

namespace fsdp::detail {

/// A function that backward can call again. Messages show `name()`.
template <class F>
class RepeatableFunction {
 public:
  explicit RepeatableFunction(F function) : function_(std::move(function)) {}
  std::string name() const {
    return "the function " + c10::demangle(typeid(F).name());
  }
  template <class... P>
  auto call(P&&... args) const {
    using Nothing = std::tuple<>;
    [[maybe_unused]] const std::conditional_t<
        std::is_nothrow_invocable_v<F&, P...>, NoEarlyStop, Nothing> whole{};
    auto function = function_; // the call may change the copy
    return std::invoke(function, static_cast<P&&>(args)...);
  }

 private:
  F function_;
};

/// A module that backward can call again.
template <class M>
class RepeatableModule {
 public:
  explicit RepeatableModule(const std::shared_ptr<M>& module) : live_(*module), module_(module) {}
  std::string name() const {
    return live_.name();
  }
  template <class... P>
  auto call(P&&... args) const {
    const auto alive = live_.lock();
    const auto module = module_.lock();
    if constexpr (std::is_base_of_v<Hookable, M>) {
      return module->forward(static_cast<P&&>(args)...);
    } else {
      return fsdp::call(torch::nn::ModuleHolder<M>(module), static_cast<P&&>(args)...);
    }
  }

 private:
  WeakModule live_;
  std::weak_ptr<M> module_;
};

template <class T>
inline constexpr bool is_module_pointer = false;
template <class M>
inline constexpr bool is_module_pointer<std::shared_ptr<M>> =
    std::is_base_of_v<torch::nn::Module, M>;

template <class F>
auto make_repeatable(F&& callee) {
  using T = std::remove_cvref_t<F>;
  if constexpr (torch::detail::is_module_holder<T>::value) {
    return RepeatableModule<typename T::ContainedType>(callee.ptr());
  } else if constexpr (is_module_pointer<T>) {
    return RepeatableModule<typename T::element_type>(callee);
  } else {
    return RepeatableFunction<std::decay_t<F>>(std::forward<F>(callee));
  }
}

} // namespace fsdp::detail
