#include "runtime/op_interceptor.h"

#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <utility>

namespace fsdp::detail {

namespace {

// A dispatch key above autograd that no tensor has. It is reached only while an interceptor
// includes it.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local OpInterceptor* innermost = nullptr;

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
  {
    const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
    bool enters = false;
    for (auto* each = innermost; each; each = each->outer()) {
      each->before(op, *stack);
      enters |= each->enters_operators();
    }
    if (!enters) {
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
