#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "base/shard_key.h"

namespace fsdp::detail {

class FSDPParam;

// Note [Guarded shards]
//
// At rest a parameter shows this rank's shard. A module that is called without its hooks then
// computes with a part of its weight, and mostly nothing tells: a Linear with fewer rows is still a
// Linear. So the tensor at rest has a dispatch key of its own, which views of it and `.data()`
// inherit. Every operator that gets such a tensor comes here first:
//
// - Inside the forward of a sharded module, no operator may get a shard, except to write to it
//   without gradients, as an average of weights does.
// - Elsewhere an optimizer or the user may read and write shards. But an operator that contracts a
//   weight with something (a matrix product, a convolution, a norm), or that spreads a shard over a
//   larger tensor, is a module's: it throws.
// - An operator that autograd records gets a view of the shard, which stays a shard.
// - Writes are counted, also those through `.data()`, which move no version counter.
//
// as_dtensor(param).to_local() has no such key, because its caller asks for the shard.

/// Guards the memory of one group's shards: throws if an operator gets a shard that it must not
/// get.
class GuardedShards {
 public:
  /// Returns the parameter at an offset of the storage, in bytes.
  using ParamAt = std::function<const FSDPParam&(int64_t offset)>;

  GuardedShards(const at::Tensor& shard, ParamAt param_at);
  ~GuardedShards();
  GuardedShards(const GuardedShards&) = delete;
  GuardedShards& operator=(const GuardedShards&) = delete;

  /// Grows when an operator is about to write to a guarded tensor.
  uint64_t num_writes() const {
    return num_writes_;
  }

 private:
  friend class ShardGuard;

  const c10::Storage storage_;
  const ParamAt param_at_;
  std::atomic<uint64_t> num_writes_{0};
};

/// Returns a guarded alias of `shard`.
at::Tensor guarded(const at::Tensor& shard);

/// Called when the calling thread enters and leaves the forward of a sharded module.
void enter_forward();
void leave_forward();

} // namespace fsdp::detail
