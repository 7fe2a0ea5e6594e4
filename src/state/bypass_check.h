#pragma once

#include "runtime/op_interceptor.h"

namespace fsdp::detail {

/// Throws when an operator is given a managed parameter that shows its shard:
/// its module was called around the hooks, and would compute with a part of
/// its weight. Watches the first forward of a root, because it costs.
class BypassCheck : public OpInterceptor {
 public:
  void before(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
};

} // namespace fsdp::detail
