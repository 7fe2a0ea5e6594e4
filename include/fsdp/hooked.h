#pragma once

// Users need one line from this file, in place of TORCH_MODULE(Net):
//
//   struct NetImpl : torch::nn::Module { ... torch::Tensor forward(torch::Tensor x); };
//   FSDP_MODULE(Net);
//
// The rest says how that works. fully_shard has to run code before and after a module's forward.
// torch::nn::Module has no hooks, and forward is not virtual. So forward is intercepted by type:
// Hooked<Impl> derives from the user's Impl and hides its forward. Such a module is called hooked.

#include <ATen/ops/linear.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <type_traits>
#include <utility>

#include <fsdp/detail/hooked_base.h>

/// Use FSDP_MODULE(Net) in place of TORCH_MODULE(Net). It declares Net, a holder of a hooked
/// NetImpl, which can be given to fully_shard.
#define FSDP_MODULE(Name) FSDP_MODULE_IMPL(Name, Name##Impl)
#define FSDP_MODULE_IMPL(Name, ImplType)         \
  class Name : public ::fsdp::Holder<ImplType> { \
   public:                                       \
    using ::fsdp::Holder<ImplType>::Holder;      \
    using Impl = ::fsdp::Hooked<ImplType>;       \
  }

namespace fsdp {

/// Impl with an intercepted forward. This general form is for a forward that is overloaded, a
/// template, static or missing: it has one variadic forward. AnyModule cannot hold such a module,
/// with or without Hooked.
template <class Impl>
class Hooked : public detail::FsdpBase<Impl> {
 public:
  using detail::FsdpBase<Impl>::FsdpBase;

  template <class... A>
    requires requires(detail::ForwardAccess<Impl>& m, A&&... a) {
      m.forward(std::forward<A>(a)...);
    }
  auto forward(A&&... args) {
    return fsdp_forward(*this, std::forward<A>(args)...);
  }
  template <class... A>
    requires requires(const detail::ForwardAccess<Impl>& m, A&&... a) {
      m.forward(std::forward<A>(a)...);
    }
  auto forward(A&&... args) const {
    return fsdp_forward(*this, std::forward<A>(args)...);
  }

 private:
  template <class Self, class... A>
  static auto fsdp_forward(Self& self, A&&... args) {
    return detail::run_forward_deduced(
        self.fsdp_site(),
        [&self](
            auto&&... held) -> decltype(self.Impl::forward(std::forward<decltype(held)>(held)...)) {
          return self.Impl::forward(std::forward<decltype(held)>(held)...);
        },
        std::forward<A>(args)...);
  }
};

// One specialisation per number of parameters of forward. It is chosen when Hooked<Impl> is
// completed, so a holder may be declared before its Impl is defined. AnyModule needs the exact
// signature of forward as a member of Hooked<Impl> itself.
#define FSDP_TAKES(N, PARAMS, ...)               \
  FSDP_TAKES_CV(N, , false, PARAMS, __VA_ARGS__) \
  FSDP_TAKES_CV(N, const, true, PARAMS, __VA_ARGS__)
#define FSDP_TAKES_CV(N, CV, IS_CONST, PARAMS, ...)                                            \
  template <class Impl>                                                                        \
    requires detail::Takes<Impl, N, IS_CONST>                                                  \
  class Hooked<Impl> : public detail::ShortOf<Impl, N> {                                       \
    using FsdpParent = detail::ShortOf<Impl, N>;                                               \
                                                                                               \
   public:                                                                                     \
    using FsdpParent::forward;                                                                 \
    using FsdpParent::FsdpParent;                                                              \
    detail::Result<typename detail::Signature<Impl>::R> forward PARAMS CV {                    \
      return this->fsdp_run(*this, std::make_index_sequence<N> {} __VA_OPT__(, ) __VA_ARGS__); \
    }                                                                                          \
  };
#define FSDP_P(I) detail::Param<Impl, I>
FSDP_TAKES(0, ())
FSDP_TAKES(1, (FSDP_P(0) a), a)
FSDP_TAKES(2, (FSDP_P(0) a, FSDP_P(1) b), a, b)
FSDP_TAKES(3, (FSDP_P(0) a, FSDP_P(1) b, FSDP_P(2) c), a, b, c)
FSDP_TAKES(4, (FSDP_P(0) a, FSDP_P(1) b, FSDP_P(2) c, FSDP_P(3) d), a, b, c, d)
FSDP_TAKES(5, (FSDP_P(0) a, FSDP_P(1) b, FSDP_P(2) c, FSDP_P(3) d, FSDP_P(4) e), a, b, c, d, e)
FSDP_TAKES(
    6,
    (FSDP_P(0) a, FSDP_P(1) b, FSDP_P(2) c, FSDP_P(3) d, FSDP_P(4) e, FSDP_P(5) f),
    a,
    b,
    c,
    d,
    e,
    f)
FSDP_TAKES(
    7,
    (FSDP_P(0) a, FSDP_P(1) b, FSDP_P(2) c, FSDP_P(3) d, FSDP_P(4) e, FSDP_P(5) f, FSDP_P(6) g),
    a,
    b,
    c,
    d,
    e,
    f,
    g)
FSDP_TAKES(
    8,
    (FSDP_P(0) a,
     FSDP_P(1) b,
     FSDP_P(2) c,
     FSDP_P(3) d,
     FSDP_P(4) e,
     FSDP_P(5) f,
     FSDP_P(6) g,
     FSDP_P(7) h),
    a,
    b,
    c,
    d,
    e,
    f,
    g,
    h)
#undef FSDP_TAKES
#undef FSDP_TAKES_CV
#undef FSDP_P

/// The forward of Sequential is called with its result type: forward<ReturnType>(inputs...).
template <>
class Hooked<torch::nn::SequentialImpl> : public detail::FsdpBase<torch::nn::SequentialImpl> {
 public:
  using detail::FsdpBase<torch::nn::SequentialImpl>::FsdpBase;
  template <class ReturnType = at::Tensor, class... A>
  ReturnType forward(A&&... args) {
    auto& self = *this;
    return detail::run_forward_deduced(
        this->fsdp_site(),
        [&self](auto&&... held) -> ReturnType {
          return self.torch::nn::SequentialImpl::template forward<ReturnType>(
              std::forward<decltype(held)>(held)...);
        },
        std::forward<A>(args)...);
  }
};

/// Computes as Python's Linear does: at::linear adds the bias inside the matrix product.
/// (LibTorch's own forward adds it afterwards if the input has more than two dims, which rounds
/// twice in bf16.)
template <>
class Hooked<torch::nn::LinearImpl> : public detail::FsdpBase<torch::nn::LinearImpl> {
 public:
  using detail::FsdpBase<torch::nn::LinearImpl>::FsdpBase;
  at::Tensor forward(const at::Tensor& input) {
    return detail::run_forward<const at::Tensor&>(
        this->fsdp_site(),
        [this](const at::Tensor& x) { return at::linear(x, this->weight, this->bias); }, input);
  }
};

/// The base class of the holders that FSDP_MODULE declares: torch's holder of a Hooked<Impl>.
template <class Impl_>
class Holder : public torch::nn::ModuleHolder<Hooked<Impl_>> {
 public:
  using torch::nn::ModuleHolder<Hooked<Impl_>>::ModuleHolder;
  using Impl = Hooked<Impl_>;
  Holder() = default;
  Holder(std::shared_ptr<Impl_>) = delete; // it has no hooks; use std::make_shared<Name::Impl>

  template <class... A, class M = Hooked<Impl_>>
  auto operator()(A&&... args) -> decltype(std::declval<M&>().forward(std::forward<A>(args)...)) {
    return this->get()->forward(std::forward<A>(args)...); // get() throws if the holder is empty
  }
};

} // namespace fsdp

// ModuleHolder reads this trait when a holder is declared, and AnyModule when it is filled. It
// must not look inside Impl, which may be incomplete.
template <class Impl>
struct torch::detail::has_forward<fsdp::Hooked<Impl>> : std::true_type {};
