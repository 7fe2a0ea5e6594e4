#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fsdp::detail {

/// While it lives, sees every operator that the calling thread calls, before it
/// runs. May change the arguments. They must end in the reverse order of their
/// beginnings; only the innermost sees anything.
class OpInterceptor {
 public:
  OpInterceptor();
  virtual ~OpInterceptor();
  OpInterceptor(const OpInterceptor&) = delete;
  OpInterceptor& operator=(const OpInterceptor&) = delete;

  virtual void before(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;
  /// Whether it sees those that operators call in turn, too.
  virtual bool enters_operators() const {
    return false;
  }

 private:
  c10::impl::IncludeDispatchKeyGuard include_;
  OpInterceptor* outer_;
};

} // namespace fsdp::detail
