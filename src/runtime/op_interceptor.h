#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fsdp::detail {

/// While it lives, sees every operator that the calling thread calls, before it
/// runs; not those that operators call in turn. May change the arguments. They
/// must end in the reverse order of their beginnings.
class OpInterceptor {
 public:
  OpInterceptor();
  virtual ~OpInterceptor();
  OpInterceptor(const OpInterceptor&) = delete;
  OpInterceptor& operator=(const OpInterceptor&) = delete;

  virtual void before(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;

 private:
  c10::impl::IncludeDispatchKeyGuard include_;
  OpInterceptor* outer_;
};

} // namespace fsdp::detail
