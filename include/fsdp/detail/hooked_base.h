#pragma once

// What every Hooked<Impl> has, and overloads of its forward for calls that leave out default
// arguments.

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

#include <fsdp/detail/forward_call.h>
#include <fsdp/detail/forward_signature.h>
#include <fsdp/hookable.h>

namespace fsdp {

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

} // namespace fsdp
