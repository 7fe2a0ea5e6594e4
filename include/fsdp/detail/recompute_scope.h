#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include <fsdp/activation_checkpoint_options.h>
#include <fsdp/export.h>

namespace fsdp::detail {

/// A call that can be made again: the callee, and copies of its arguments.
class RepeatableCall {
 public:
  virtual ~RepeatableCall() = default;
  /// The callee's name, for messages.
  virtual std::string name() const = 0;
  /// Moves the tensors out of the kept arguments, always in the same order.
  virtual std::vector<at::Tensor> take_tensors() = 0;
  /// Puts `tensors` back into the arguments, in the order of take_tensors, and makes the call.
  virtual void run(std::vector<at::Tensor> tensors) = 0;
};

/// Wraps a call that `call` can make again. While the scope exists, tensors that autograd saves
/// in the calling thread are dropped. Backward makes the call when it needs one of them.
class FSDP_API RecomputeScope {
 public:
  /// Returns false if autograd saves nothing, because grad mode is off.
  static bool needed();

  RecomputeScope(std::unique_ptr<RepeatableCall> call, const ActivationCheckpointOptions& options);
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

  /// Returns true while an exception ends a recomputation that has all it needs. Such an
  /// exception is not an error.
  static bool stopping();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// While this object exists, recomputations in the calling thread do not end early.
class FSDP_API NoEarlyStop {
 public:
  NoEarlyStop();
  ~NoEarlyStop();
  NoEarlyStop(const NoEarlyStop&) = delete;
  NoEarlyStop& operator=(const NoEarlyStop&) = delete;
};

} // namespace fsdp::detail
