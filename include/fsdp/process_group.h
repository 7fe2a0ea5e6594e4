#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/export.h>
#include <fsdp/reduce_op.h>

namespace c10d {
class Backend;
}

namespace fsdp {

class ProcessGroup;
class Work;

namespace detail {
class BackendFactory;
template <class Value>
class ByGroup;
struct GroupState;
struct WorkState;
struct CollectiveCall;
struct GatherPlan;
Work all_gather_placed_async(
    const ProcessGroup& group,
    at::Tensor out,
    at::Tensor in,
    std::shared_ptr<const GatherPlan> plan);
void compare_calls(const std::vector<ProcessGroup>& groups, at::Device device);
/// Makes a group of ranks of the world to which `group` belongs. See ProcessGroup::new_group.
ProcessGroup group_of_world_ranks(const ProcessGroup& group, const std::vector<int>& world_ranks);
} // namespace detail

/// A collective in flight. Read its result, and change its inputs, only after `wait()`. On the
/// CPU `wait()` blocks. On an accelerator it makes the current stream wait for the collective.
class FSDP_API Work {
 public:
  /// A Work that is complete.
  Work() = default;

  /// Throws CommError if the collective failed. May be called again, for example on another
  /// stream.
  void wait();

  /// Lets the first `wait()` of this Work and its copies call `finish` at its end, for collectives
  /// of your own that compute something from the result. May be called once. On an accelerator,
  /// only the stream that waits first sees what `finish` does.
  void then(std::function<void()> finish);

 private:
  friend class ProcessGroup;
  explicit Work(std::shared_ptr<detail::WorkState> state);

  std::shared_ptr<detail::WorkState> state_;
};

/// The ranks that communicate with each other, as seen by one of them. A value type: copies share
/// the group. Every rank of the group must call the same collectives in the same order. Tensors
/// must be contiguous, and those of one collective must have the same dtype and device. Each
/// collective has an asynchronous form that returns a Work.
class FSDP_API ProcessGroup {
 public:
  /// An empty group. Only `defined()` may be called.
  ProcessGroup() = default;

  /// A group over any c10d backend, for example one of your own. new_group works only for groups
  /// that come from `init_process_group`.
  explicit ProcessGroup(
      const c10::intrusive_ptr<c10d::Backend>& backend, std::string name = "custom");

  bool defined() const {
    return state_ != nullptr;
  }
  /// This rank's number in the group, and the number of ranks.
  int rank() const;
  int size() const;
  /// The world ranks of the members, in the order of their ranks in the group.
  const std::vector<int>& ranks() const;
  const std::string& name() const;
  /// "threads", "gloo", "nccl", "fake", or the name that your own backend gives itself.
  std::string backend_name() const;
  const c10::intrusive_ptr<c10d::Backend>& backend() const;

  /// Fills `out` with the `in` of all ranks, one after another.
  void all_gather(at::Tensor out, at::Tensor in) const;
  Work all_gather_async(at::Tensor out, at::Tensor in) const;

  /// `in` holds one part per rank. Fills `out` with this rank's part, reduced over the ranks.
  void reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op = {}) const;
  Work reduce_scatter_async(at::Tensor out, at::Tensor in, ReduceOp op = {}) const;

  void all_reduce(at::Tensor tensor, ReduceOp op = {}) const;
  Work all_reduce_async(at::Tensor tensor, ReduceOp op = {}) const;

  /// Sends the tensor of `root`, a rank of this group, to all others.
  void broadcast(at::Tensor tensor, int root) const;
  Work broadcast_async(at::Tensor tensor, int root) const;

  /// The `in` of `root` holds one part per rank, and `out` receives this rank's part. The `in` of
  /// the other ranks may be undefined.
  void scatter(at::Tensor out, at::Tensor in, int root) const;
  Work scatter_async(at::Tensor out, at::Tensor in, int root) const;

  /// Part i of `in` goes to rank i; part i of `out` comes from rank i. The parts are equal unless
  /// the splits give their lengths along dim 0.
  void all_to_all(
      at::Tensor out,
      at::Tensor in,
      std::vector<int64_t> out_splits = {},
      std::vector<int64_t> in_splits = {}) const;
  Work all_to_all_async(
      at::Tensor out,
      at::Tensor in,
      std::vector<int64_t> out_splits = {},
      std::vector<int64_t> in_splits = {}) const;

  /// Returns when every rank has called it.
  void barrier() const;
  Work barrier_async() const;

  /// Returns a 1D tensor in memory that the backend has registered, if the backend can do so
  /// (nccl), else an ordinary tensor.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const;

  /// Makes a group of some ranks of this group, in the given order. Exactly these ranks must call
  /// it. The same ranks and tag give the same (shared) group every time. Another tag gives
  /// another group, whose collectives do not queue behind those of the first.
  ProcessGroup new_group(const std::vector<int>& ranks, const std::string& tag = "") const;

  /// Whether both are copies of one group.
  bool operator==(const ProcessGroup& other) const = default;

  explicit ProcessGroup(std::shared_ptr<detail::GroupState> state);

 private:
  friend Work detail::all_gather_placed_async(
      const ProcessGroup& group,
      at::Tensor out,
      at::Tensor in,
      std::shared_ptr<const detail::GatherPlan> plan);
  template <class Value>
  friend class detail::ByGroup;
  friend void detail::compare_calls(const std::vector<ProcessGroup>& groups, at::Device device);
  friend ProcessGroup detail::group_of_world_ranks(
      const ProcessGroup& group, const std::vector<int>& world_ranks);
  std::shared_ptr<detail::BackendFactory> factory() const;
  Work issue(detail::CollectiveCall call) const;

  std::shared_ptr<detail::GroupState> state_;
};

} // namespace fsdp
