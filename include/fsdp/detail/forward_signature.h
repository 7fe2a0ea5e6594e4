#pragma once

// The signature of a module's forward, which hooked.h gives to the forward that hides it.

#include <cstddef>
#include <tuple>

namespace fsdp::detail {

template <class R_, bool C, class... A>
struct Parsed {
  using R = R_;
  static constexpr int arity = sizeof...(A);
  static constexpr bool is_const = C;
  static constexpr bool is_noexcept = false;
  template <size_t I>
  using P = std::tuple_element_t<I, std::tuple<A...>>;
};
template <class F>
struct Parse {
  using R = void;
  static constexpr int arity = -1; // overloaded, a template, static, or missing
  static constexpr bool is_const = false;
  static constexpr bool is_noexcept = false;
  template <size_t>
  using P = int;
};
template <class R, class C, class... A>
struct Parse<R (C::*)(A...)> : Parsed<R, false, A...> {};
template <class R, class C, class... A>
struct Parse<R (C::*)(A...) const> : Parsed<R, true, A...> {};
template <class R, class C, class... A>
struct Parse<R (C::*)(A...) noexcept> : Parsed<R, false, A...> {
  static constexpr bool is_noexcept = true;
};
template <class R, class C, class... A>
struct Parse<R (C::*)(A...) const noexcept> : Parsed<R, true, A...> {
  static constexpr bool is_noexcept = true;
};

// A protected forward is found, too. Users declare forward protected to make every call that
// avoids the hooks, such as as<NetImpl>()->forward(x), a compile error.
struct ForwardDecoy {
  int forward;
};
template <class Impl>
struct ForwardProbe : Impl, ForwardDecoy {};
template <class Impl>
concept HasForward = !requires { &ForwardProbe<Impl>::forward; }; // ambiguous if Impl has one
template <class Impl>
struct ForwardAccess : Impl {};
template <HasForward Impl>
struct ForwardAccess<Impl> : Impl {
  using Impl::forward;
};
template <class Impl>
struct Signature : Parse<void> {};
template <class Impl>
  requires requires { &ForwardAccess<Impl>::forward; }
struct Signature<Impl> : Parse<decltype(&ForwardAccess<Impl>::forward)> {};
template <class Impl, size_t I>
using Param = typename Signature<Impl>::template P<I>;

} // namespace fsdp::detail
