#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include <fsdp/export.h>

namespace fsdp {

struct ActivationCheckpointOptions {
  /// Recomputation draws the numbers that forward drew from torch's default
  /// generators. These go on afterwards as if it had not drawn.
  bool preserve_rng_state = true;
  /// Recomputation ends as soon as it has what backward needs: by an exception
  /// that is no std::exception, so not through a function that is noexcept.
  bool early_stop = true;
  /// Throw where recomputation saves tensors of other sizes, dtypes or devices
  /// than forward, or a weight that was written to since. Another number of
  /// tensors is always an error.
  bool determinism_check = true;
};

namespace detail {

/// A call that can be made again: the callee, and copies of its arguments.
class Region {
 public:
  virtual ~Region() = default;
  /// For messages.
  virtual std::string name() const = 0;
  /// Out of the arguments, in an order that stays.
  virtual std::vector<at::Tensor> take_tensors() = 0;
  /// Calls, with these in their places.
  virtual void run(std::vector<at::Tensor> tensors) = 0;
};

/// While it lives, what autograd saves in the calling thread is dropped;
/// backward runs the region once more when it needs any of it. Around the call
/// that the region would repeat.
class FSDP_API CheckpointScope {
 public:
  /// Whether autograd saves anything at all.
  static bool needed();

  CheckpointScope(std::unique_ptr<Region> region, const ActivationCheckpointOptions& options);
  ~CheckpointScope();
  CheckpointScope(const CheckpointScope&) = delete;
  CheckpointScope& operator=(const CheckpointScope&) = delete;

  /// Whether the exception that unwinds the calling thread only ends a
  /// recomputation that has all it needs.
  static bool stopping();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// While it lives, recomputations in the calling thread do not end early.
class FSDP_API RunsToTheEnd {
 public:
  RunsToTheEnd();
  ~RunsToTheEnd();
  RunsToTheEnd(const RunsToTheEnd&) = delete;
  RunsToTheEnd& operator=(const RunsToTheEnd&) = delete;
};

} // namespace detail

} // namespace fsdp
