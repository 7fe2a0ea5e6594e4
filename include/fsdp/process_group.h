#pragma once

#include <ATen/core/Tensor.h>

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
struct GroupState;
struct WorkState;
struct CollectiveCall;
struct GatherPlan;
Work all_gather_placed_async(
    const ProcessGroup& group,
    at::Tensor out,
    at::Tensor in,
    std::shared_ptr<const GatherPlan> plan);
} // namespace detail

/// A collective under way. The result may be read, and the inputs changed,
/// only after `wait()`: on the CPU that blocks; on an accelerator it orders
/// the current stream behind the collective.
class FSDP_API Work {
 public:
  /// A work that is already complete.
  Work() = default;

  /// Throws CommError when the collective failed. A second call does nothing.
  void wait();

 private:
  friend class ProcessGroup;
  explicit Work(std::shared_ptr<detail::WorkState> state);

  std::shared_ptr<detail::WorkState> state_;
};

/// The ranks that communicate, seen from one of them. A value: copies share
/// the group. Every collective must be called by every rank of the group, in
/// the same order; tensors are contiguous and of one dtype and device.
/// Each has an asynchronous form that returns a Work.
class FSDP_API ProcessGroup {
 public:
  /// No group: only `defined()` may be called.
  ProcessGroup() = default;

  /// A group over any c10d backend, for example one of your own. Sub-groups
  /// can be made only of groups that come from `init_process_group`.
  explicit ProcessGroup(
      const c10::intrusive_ptr<c10d::Backend>& backend, std::string name = "custom");

  bool defined() const {
    return state_ != nullptr;
  }
  /// This rank's number in the group, and the number of ranks.
  int rank() const;
  int size() const;
  /// The members' world ranks, in group order.
  const std::vector<int>& ranks() const;
  const std::string& name() const;
  /// "threads", "gloo", "nccl", "fake", or what a backend calls itself.
  std::string backend_name() const;
  const c10::intrusive_ptr<c10d::Backend>& backend() const;

  /// `out` receives the ranks' `in` one after another.
  void all_gather(at::Tensor out, at::Tensor in) const;
  Work all_gather_async(at::Tensor out, at::Tensor in) const;

  /// `in` holds one part per rank; `out` receives this rank's, reduced.
  void reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op = {}) const;
  Work reduce_scatter_async(at::Tensor out, at::Tensor in, ReduceOp op = {}) const;

  void all_reduce(at::Tensor tensor, ReduceOp op = {}) const;
  Work all_reduce_async(at::Tensor tensor, ReduceOp op = {}) const;

  /// `root` is a rank of this group.
  void broadcast(at::Tensor tensor, int root) const;
  Work broadcast_async(at::Tensor tensor, int root) const;

  /// `root`'s `in` holds one part per rank; the others' may be undefined.
  void scatter(at::Tensor out, at::Tensor in, int root) const;
  Work scatter_async(at::Tensor out, at::Tensor in, int root) const;

  /// Part i of `in` goes to rank i; part i of `out` comes from it. Parts are
  /// equal, or given as lengths along dim 0.
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

  /// A 1D tensor in memory that the transport knows, where the backend has such
  /// (nccl), else an ordinary one.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const;

  /// The group of these ranks of this group, in the given order; called by
  /// exactly those. The same ranks and tag give the same (shared) group every
  /// time; another tag gives one whose collectives do not queue behind.
  ProcessGroup new_group(const std::vector<int>& ranks, const std::string& tag = "") const;

  /// The same members over the same transport.
  bool operator==(const ProcessGroup& other) const = default;

  explicit ProcessGroup(std::shared_ptr<detail::GroupState> state);

 private:
  friend Work detail::all_gather_placed_async(
      const ProcessGroup& group,
      at::Tensor out,
      at::Tensor in,
      std::shared_ptr<const detail::GatherPlan> plan);
  Work issue(detail::CollectiveCall call) const;

  std::shared_ptr<detail::GroupState> state_;
};

} // namespace fsdp
