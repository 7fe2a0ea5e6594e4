#pragma once

// Users write one line of this file's, in place of TORCH_MODULE(Net):
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
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <fsdp/detail/forward_call.h>
#include <fsdp/detail/forward_signature.h>

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

template <class Impl>
class Hooked;

namespace detail {

struct FsdpNothing {};

// This is not a member, because a member would be compiled again for every module type.
inline void print_renamed(
    std::ostream& stream,
    const torch::nn::Module& module,
    void (*print)(const torch::nn::Module&, std::ostream&),
    std::string new_name) {
  std::ostringstream out;
  print(module, out);
  auto text = out.str();
  auto name = c10::demangle(typeid(module).name());
  if (text.find(name) == std::string::npos && new_name.ends_with("Impl")) {
    name.resize(name.size() - 4); // RNN modules print their name without "Impl"
    new_name.resize(new_name.size() - 4);
  }
  if (const auto at = text.find(name); at != std::string::npos) {
    text.replace(at, name.size(), new_name);
  }
  stream << text;
}

// A member declared here hides a user's member of the same name. So this class has only forward,
// overrides of torch's virtual functions, and names that begin with Fsdp or fsdp_.
template <class FsdpImpl>
class FsdpBase
    : public FsdpImpl,
      public std::conditional_t<std::is_base_of_v<Hookable, FsdpImpl>, FsdpNothing, Hookable> {
  static_assert(
      std::is_base_of_v<torch::nn::Module, FsdpImpl>,
      "FSDP_MODULE(Name): NameImpl must derive from torch::nn::Module");
  static_assert(!std::is_final_v<FsdpImpl>, "FSDP_MODULE(Name): NameImpl must not be final");
  static_assert(
      !std::is_abstract_v<FsdpImpl>,
      "FSDP_MODULE(Name): NameImpl is abstract; keep TORCH_MODULE for it and use FSDP_MODULE for "
      "the concrete classes");

 public:
  using FsdpImpl::FsdpImpl;
  FsdpBase() = default;
  explicit FsdpBase(const FsdpImpl& other)
    requires std::is_copy_constructible_v<FsdpImpl>
      : FsdpImpl(other) {}
  explicit FsdpBase(FsdpImpl&& other)
    requires std::is_move_constructible_v<FsdpImpl>
      : FsdpImpl(std::move(other)) {}

  bool fsdp_has_forward() const override {
    return HasForward<FsdpImpl>;
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    fsdp_refuse("torch::save");
    FsdpImpl::save(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    fsdp_refuse("torch::load");
    FsdpImpl::load(archive);
  }
  // Makes a hooked copy. Cloneable alone would make a plain FsdpImpl.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    fsdp_refuse("clone");
    auto copy = FsdpImpl::clone(device);
    auto* impl = dynamic_cast<FsdpImpl*>(copy.get());
    if (impl == nullptr || dynamic_cast<Hooked<FsdpImpl>*>(impl) != nullptr) {
      return copy;
    }
    if constexpr (std::is_move_constructible_v<FsdpImpl>) {
      auto hooked = std::make_shared<Hooked<FsdpImpl>>(std::move(*impl));
      hooked->fsdp_recompute = this->fsdp_recompute;
      return hooked;
    } else {
      TORCH_CHECK(false, "clone: ", fsdp_type_name(), " cannot be moved");
    }
  }
  // Prints the name of FsdpImpl instead of fsdp::Hooked<FsdpImpl>.
  void pretty_print(std::ostream& stream) const override {
    print_renamed(
        stream, *this,
        [](const torch::nn::Module& self, std::ostream& out) {
          static_cast<const FsdpImpl&>(self).FsdpImpl::pretty_print(out);
        },
        fsdp_type_name());
  }

 protected:
  CallSite fsdp_site() const {
    return {
        this->fsdp_state, static_cast<const torch::nn::Module*>(this), &this->fsdp_hooks,
        this->fsdp_recompute};
  }
  template <class Self, size_t... I>
  static decltype(auto) fsdp_run(
      Self& self, std::index_sequence<I...>, std::remove_reference_t<Param<FsdpImpl, I>>&... args) {
    using Whole = std::conditional_t<Signature<FsdpImpl>::is_noexcept, NoEarlyStop, FsdpNothing>;
    return run_forward<Param<FsdpImpl, I>...>(
        self.fsdp_site(),
        [&self](Param<FsdpImpl, I>&&... held) -> decltype(auto) {
          [[maybe_unused]] const Whole whole{};
          return self.FsdpImpl::forward(static_cast<Param<FsdpImpl, I>&&>(held)...);
        },
        static_cast<Param<FsdpImpl, I>&&>(args)...);
  }

 private:
  static std::string fsdp_type_name() {
    return c10::demangle(typeid(FsdpImpl).name());
  }
  void fsdp_refuse(const char* what) const {
    TORCH_CHECK(
        !this->fsdp_state && this->fsdp_hooks.empty(),
        this->fsdp_state ? "fully_shard" : "parallelize_module",
        " does not support deepcopy or archives: ", what, " of ", fsdp_type_name(),
        ", which is sharded, would take only this rank's shards");
  }
};

// Default arguments of forward: there is one overload for each shorter call that compiles.
// AnyModule takes the address of forward as R (C::*)(A...). The & of the shorter overloads keeps
// them from matching, so that AnyModule finds the full signature.
template <class Impl, class Indices>
class FsdpShort;
template <class Impl>
class FsdpShort<Impl, void> : public FsdpBase<Impl> {
 public:
  using FsdpBase<Impl>::FsdpBase;
  using Impl::forward;
};
template <size_t N>
struct Shorter {
  using type = std::make_index_sequence<N - 1>;
};
template <>
struct Shorter<0> {
  using type = void;
};
template <class Impl, size_t... I>
class FsdpShort<Impl, std::index_sequence<I...>>
    : public FsdpShort<Impl, typename Shorter<sizeof...(I)>::type> {
  using FsdpShorter = FsdpShort<Impl, typename Shorter<sizeof...(I)>::type>;

 public:
  using FsdpShorter::forward;
  using FsdpShorter::FsdpShorter;
  // clang-format takes the two overloads for one.
  // clang-format off
  Result<typename Signature<Impl>::R> forward(Param<Impl, I>... args) &
    requires(
        !Signature<Impl>::is_const &&
        requires(ForwardAccess<Impl>& m) { m.forward(std::declval<Param<Impl, I>>()...); })
  {
    return this->fsdp_run(*this, std::index_sequence<I...>{}, args...);
  }
  Result<typename Signature<Impl>::R> forward(Param<Impl, I>... args) const&
    requires(
        Signature<Impl>::is_const &&
        requires(const ForwardAccess<Impl>& m) { m.forward(std::declval<Param<Impl, I>>()...); })
  {
    return this->fsdp_run(*this, std::index_sequence<I...>{}, args...);
  }
  // clang-format on
};
template <class Impl, int N>
using ShortOf = FsdpShort<Impl, typename Shorter<N>::type>;
template <class Impl, int N, bool C>
concept Takes = Signature<Impl>::arity == N && Signature<Impl>::is_const == C;

} // namespace detail

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

/// Use FSDP_MODULE(Net) in place of TORCH_MODULE(Net). It declares Net, a holder of a hooked
/// NetImpl, which can be given to fully_shard.
#define FSDP_MODULE(Name) FSDP_MODULE_IMPL(Name, Name##Impl)
#define FSDP_MODULE_IMPL(Name, ImplType)         \
  class Name : public ::fsdp::Holder<ImplType> { \
   public:                                       \
    using ::fsdp::Holder<ImplType>::Holder;      \
    using Impl = ::fsdp::Hooked<ImplType>;       \
  }
