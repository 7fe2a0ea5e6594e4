#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include <fsdp/export.h>
#include <fsdp/save_policy.h>

namespace fsdp {

struct ActivationCheckpointOptions {
  /// Whether recomputation draws the same random numbers from torch's default generators as
  /// forward did. Afterwards the generators continue as if nothing had been drawn again.
  bool preserve_rng_state = true;
  /// Whether recomputation ends as soon as it has what backward needs. It then ends by an
  /// exception that does not derive from std::exception, which must not pass through a noexcept
  /// function.
  bool early_stop = true;
  /// Whether to throw if recomputation saves tensors of other sizes, dtypes or devices than
  /// forward did, or if a weight was written to in between. Saving fewer tensors is always an
  /// error; without `early_stop`, so is saving more.
  bool determinism_check = true;
  /// Chooses results of operators to keep, so that recomputation does not run these operators
  /// again. If this is null, none are kept. See save_matmuls, save_operators and save_within.
  std::shared_ptr<SavePolicy> save;
};

namespace detail {

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

} // namespace detail

} // namespace fsdp
