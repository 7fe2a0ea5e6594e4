#pragma once

// A call that backward can make again, with its types.

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

#include <fsdp/checkpoint_scope.h>
#include <fsdp/export.h>
#include <fsdp/tree.h>

namespace fsdp::detail {

// ------------------------------------------------------------ Arguments

// Whether a copy of an argument is as good in backward: not where it refers to
// memory of the caller's, or may be a part of something.
template <class T>
inline constexpr bool keeps = std::is_copy_constructible_v<T> && !std::is_polymorphic_v<T>;
template <class T>
inline constexpr bool keeps<std::vector<T>> = keeps<T>;
template <class T>
inline constexpr bool keeps<c10::ArrayRef<T>> = false;
template <class T>
inline constexpr bool keeps<c10::OptionalArrayRef<T>> = false;
template <class T>
inline constexpr bool keeps<std::initializer_list<T>> = false;
template <>
inline constexpr bool keeps<std::string_view> = false;

// An array or a function is passed as what it decays to.
template <class A>
inline constexpr bool decays =
    std::is_array_v<std::remove_reference_t<A>> || std::is_function_v<std::remove_reference_t<A>>;
template <class A>
using Passed = std::conditional_t<decays<A>, std::decay_t<A>, A>;

template <class... P>
inline constexpr bool can_repeat = ((!decays<P> && keeps<std::decay_t<P>>) && ...);

/// `again.call<P...>(args...)`, with the arguments as they are now. P are the
/// parameter types of the callee; one that it may write to is a copy as well.
template <class Again, class... P>
class RegionOf : public Region {
 public:
  RegionOf(Again again, const std::remove_reference_t<P>&... args)
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
    auto args = args_; // the call may use them up, and not be the last
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

/// A module that may be called again. Not kept alive: it may hold results of its
/// own, and would never end.
class FSDP_API LiveModule {
 public:
  explicit LiveModule(const torch::nn::Module& module);
  /// Throws if it is gone; which we cannot know of one in no shared_ptr.
  std::shared_ptr<const torch::nn::Module> lock() const;
  /// "'layers.0' (BlockImpl)", or without a name where it is not sharded.
  std::string name() const;

 private:
  std::weak_ptr<const torch::nn::Module> owned_;
  const torch::nn::Module* not_owned_;
  const std::type_info* type_;
};

[[noreturn]] FSDP_API void refuse_arguments(const torch::nn::Module& module);

} // namespace fsdp::detail
