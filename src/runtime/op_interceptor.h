#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

namespace fsdp::detail {

/// The rest of an operator's call below autograd: its kernel.
struct OpKernel {
  const c10::OperatorHandle& op;
  const c10::DispatchKeySet keys;
  /// Replaces the arguments on the stack by the results.
  void run(torch::jit::Stack& stack) const {
    op.redispatchBoxed(keys, &stack);
  }
};

/// While this object lives, `before` is called ahead of every operator that the calling thread
/// calls, and may change the arguments. Interceptors nest: destroy them in the reverse order of
/// construction. The innermost one is called first.
class OpInterceptor {
 public:
  OpInterceptor();
  virtual ~OpInterceptor();
  OpInterceptor(const OpInterceptor&) = delete;
  OpInterceptor& operator=(const OpInterceptor&) = delete;

  virtual void before(const c10::OperatorHandle&, torch::jit::Stack&) {}
  /// Whether `before` is also called for operators that other operators call. If one active
  /// interceptor wants this, it applies to all of them.
  virtual bool enters_operators() const {
    return false;
  }

  /// Whether autograd calls `instead` in the place of the operator's kernel. Autograd records the
  /// operator as always. Has an effect only if an active interceptor enters operators. The
  /// innermost one that answers yes is called.
  virtual bool replaces(const c10::OperatorHandle&, const torch::jit::Stack&) {
    return false;
  }
  /// Runs the kernel or finds the results elsewhere.
  virtual void instead(const OpKernel& kernel, torch::jit::Stack& stack) {
    kernel.run(stack);
  }

  /// The interceptor around this one, or null.
  OpInterceptor* outer() const {
    return outer_;
  }

 private:
  c10::impl::IncludeDispatchKeyGuard include_;
  OpInterceptor* const outer_;
};

/// The arguments of an operator that is about to run, and their schema.
struct OpArguments {
  OpArguments(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema(op.schema().arguments()), values(stack.data() + stack.size() - schema.size()) {}

  /// Returns true if argument `i` is an optional of this kind and has no value.
  bool is_left_out(size_t i, c10::TypeKind kind) const;
  /// The device of the first tensor; else the one given as an argument; else the CPU.
  c10::Device device() const;

  const std::vector<c10::Argument>& schema;
  c10::IValue* const values;
};

} // namespace fsdp::detail
