#include "runtime/op_interceptor.h"

#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fsdp::detail {

namespace {

// A dispatch key above autograd that no tensor has. It is reached only while an interceptor
// includes it.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local OpInterceptor* innermost = nullptr;

// A dispatch key between autograd and the kernels that no tensor has. A call has it only if
// `redispatch` has added it. Autograd hands it on.
constexpr auto kKeyBelowAutograd = c10::DispatchKey::CustomRNGKeyId;

/// The interceptor that replaces the kernel of the operator that autograd handles now.
thread_local OpInterceptor* replacement = nullptr;

void run_below_autograd(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto* const by = std::exchange(replacement, nullptr);
  const OpKernel kernel{
      op, keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKeyBelowAutograd)};
  if (by) {
    by->instead(kernel, *stack);
  } else {
    kernel.run(*stack);
  }
}

/// Sends calls of `op` with kKeyBelowAutograd to run_below_autograd. A fallback for all operators
/// does not work: kernels that consist of other operators come before it.
void register_below_autograd(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto& handles = // never given back
      *new std::unordered_map<c10::OperatorName, c10::RegistrationHandleRAII>;
  thread_local std::unordered_set<const c10::FunctionSchema*> known; // spares the lock
  if (!known.insert(&op.schema()).second) {
    return;
  }
  const auto& name = op.operator_name();
  const std::lock_guard lock(mutex);
  if (!handles.contains(name)) {
    handles.emplace(
        name, c10::Dispatcher::singleton().registerImpl(
                  name, kKeyBelowAutograd,
                  c10::KernelFunction::makeFromBoxedFunction<&run_below_autograd>(), std::nullopt,
                  nullptr, "fsdp: below autograd"));
  }
}

/// Sends the operator to autograd. If `by` is not null, it runs in the place of the kernel.
void redispatch(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    OpInterceptor* by,
    torch::jit::Stack* stack) {
  if (!by) {
    op.redispatchBoxed(keys, stack);
    return;
  }
  register_below_autograd(op);
  struct Restore {
    OpInterceptor* const outer;
    ~Restore() {
      replacement = outer;
    }
  } const restore{std::exchange(replacement, by)};
  op.redispatchBoxed(keys.add(kKeyBelowAutograd), stack);
}

} // namespace

OpInterceptor::OpInterceptor() : include_(kKey), outer_(std::exchange(innermost, this)) {}

OpInterceptor::~OpInterceptor() {
  innermost = outer_;
}

bool OpArguments::is_left_out(size_t i, c10::TypeKind kind) const {
  const auto optional = schema[i].type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == kind && values[i].isNone();
}

c10::Device OpArguments::device() const {
  c10::Device named = c10::kCPU;
  for (size_t i = 0; i < schema.size(); ++i) {
    if (values[i].isTensor() && values[i].toTensor().defined()) {
      return values[i].toTensor().device();
    }
    named = values[i].isDevice() ? values[i].toDevice() : named;
  }
  return named;
}

} // namespace fsdp::detail

namespace {

void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  using namespace fsdp::detail;
  OpInterceptor* by = nullptr;
  {
    const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
    bool enters = false;
    for (auto* each = innermost; each; each = each->outer()) {
      each->before(op, *stack);
      enters |= each->enters_operators();
      if (!by && each->replaces(op, *stack)) {
        by = each;
      }
    }
    if (!enters) {
      op.callBoxed(stack);
      return;
    }
  }
  redispatch(op, keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), by, stack);
}

} // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>());
}
