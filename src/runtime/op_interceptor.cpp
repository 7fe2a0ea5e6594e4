#include "runtime/op_interceptor.h"

#include <torch/library.h>

#include <utility>

namespace fsdp::detail {

namespace {

// A key above autograd that no tensor carries: reached only where included.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local OpInterceptor* innermost = nullptr;

} // namespace

OpInterceptor::OpInterceptor() : include_(kKey), outer_(std::exchange(innermost, this)) {}

OpInterceptor::~OpInterceptor() {
  innermost = outer_;
}

} // namespace fsdp::detail

namespace {

void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  using namespace fsdp::detail;
  {
    const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
    if (innermost) {
      innermost->before(op, *stack);
    }
    if (!innermost || !innermost->enters_operators()) {
      op.callBoxed(stack);
      return;
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

} // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>());
}
