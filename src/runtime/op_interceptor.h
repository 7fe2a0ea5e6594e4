#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

namespace fsdp::detail {

/// While it lives, sees every operator that the calling thread calls, before it
/// runs. May change the arguments. They must end in the reverse order of their
/// beginnings; of several, the innermost sees it first.
class OpInterceptor {
 public:
  OpInterceptor();
  virtual ~OpInterceptor();
  OpInterceptor(const OpInterceptor&) = delete;
  OpInterceptor& operator=(const OpInterceptor&) = delete;

  virtual void before(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;
  /// Whether it sees those that operators call in turn, too; where one does, all
  /// do.
  virtual bool enters_operators() const {
    return false;
  }

  /// The one that was there before.
  OpInterceptor* outer() const {
    return outer_;
  }

 private:
  c10::impl::IncludeDispatchKeyGuard include_;
  OpInterceptor* const outer_;
};

/// The arguments of an operator that is about to run, and what they are.
struct OpArguments {
  OpArguments(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema(op.schema().arguments()), values(stack.data() + stack.size() - schema.size()) {}

  /// One of the kind that may be left out, and was.
  bool is_left_out(size_t i, c10::TypeKind kind) const;
  /// The first tensor's, else the one that is named, else the CPU.
  c10::Device device() const;

  const std::vector<c10::Argument>& schema;
  c10::IValue* const values;
};

} // namespace fsdp::detail
