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

void intercept(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard exclude(fsdp::detail::kKey);
  if (fsdp::detail::innermost) {
    fsdp::detail::innermost->before(op, *stack);
  }
  op.callBoxed(stack);
}

} // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>());
}
