#pragma once

// A typed call that backward can make again, to recompute activations.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/OptionalArrayRef.h>
#include <torch/nn/module.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <fsdp/detail/recompute_scope.h>
#include <fsdp/export.h>
#include <fsdp/tree.h>

namespace fsdp::detail {

// ------------------------------------------------------------ Arguments

// Whether a copy of an argument can stand in for it when backward repeats the call. It cannot if
// the type refers to the caller's memory, or if the type is polymorphic: a copy would lose the
// derived part.
template <class T>
inline constexpr bool is_safe_to_copy =
    std::is_copy_constructible_v<T> && !std::is_polymorphic_v<T>;
template <class T>
inline constexpr bool is_safe_to_copy<std::vector<T>> = is_safe_to_copy<T>;
template <class T>
inline constexpr bool is_safe_to_copy<c10::ArrayRef<T>> = false;
template <class T>
inline constexpr bool is_safe_to_copy<c10::OptionalArrayRef<T>> = false;
template <class T>
inline constexpr bool is_safe_to_copy<std::initializer_list<T>> = false;
template <>
inline constexpr bool is_safe_to_copy<std::string_view> = false;

// An array or a function is passed as the pointer that it decays to.
template <class A>
inline constexpr bool decays =
    std::is_array_v<std::remove_reference_t<A>> || std::is_function_v<std::remove_reference_t<A>>;
template <class A>
using PassedType = std::conditional_t<decays<A>, std::decay_t<A>, A>;

template <class... P>
// NOLINTNEXTLINE(misc-redundant-expression): two parameters may be of one type
inline constexpr bool can_repeat = ((!decays<P> && is_safe_to_copy<std::decay_t<P>>) && ...);

/// The call `again.call<P...>(args...)` with copies of the arguments as they are now. P are the
/// parameter types of the callee. An argument that the callee may write to is a copy, too.
template <class Again, class... P>
class RepeatableCallOf : public RepeatableCall {
 public:
  explicit RepeatableCallOf(Again again, const std::remove_reference_t<P>&... args)
      : again_(std::move(again)), args_(args...) {}

  std::string name() const override {
    return again_.name();
  }
  std::vector<at::Tensor> take_tensors() override {
    std::vector<at::Tensor> tensors;
    visit([&](at::Tensor& tensor) { tensors.push_back(std::move(tensor)); });
    return tensors;
  }
  void run(std::vector<at::Tensor> tensors) override {
    auto next = tensors.begin();
    visit([&](at::Tensor& tensor) { tensor = std::move(*next++); });
    auto args = args_; // the call may move from its arguments, and run again
    visit([](at::Tensor& tensor) { tensor.reset(); });
    std::apply(
        [this](auto&... arg) { again_.template call<P...>(static_cast<P&&>(arg)...); }, args);
  }

 private:
  template <class F>
  void visit(F f) {
    std::apply([&](auto&... arg) { (visit_tensors(arg, f), ...); }, args_);
  }

  const Again again_;
  std::tuple<std::decay_t<P>...> args_;
};

// ------------------------------------------------------------ Callees

/// A module that backward may call again. Does not keep the module alive: the module may hold a
/// result of its own call, and the two would keep each other alive forever.
class FSDP_API WeakModule {
 public:
  explicit WeakModule(const torch::nn::Module& module);
  /// Throws if the module is gone. A module that no shared_ptr owns cannot be checked.
  std::shared_ptr<const torch::nn::Module> lock() const;
  /// "'layers.0' (BlockImpl)", or only the type if the module is not sharded.
  std::string name() const;

 private:
  std::weak_ptr<const torch::nn::Module> owned_;
  const torch::nn::Module* not_owned_;
  const std::type_info* type_;
};

/// Throws NotImplementedError: an argument of the module cannot be kept for a second call.
[[noreturn]] FSDP_API void refuse_arguments(const torch::nn::Module& module);

} // namespace fsdp::detail
