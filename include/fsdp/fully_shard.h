#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <vector>

#include <fsdp/comm.h>
#include <fsdp/dtensor.h>
#include <fsdp/export.h>
#include <fsdp/hooked.h>
#include <fsdp/module_ref.h>
#include <fsdp/param.h>
#include <fsdp/policy.h>
#include <fsdp/sharding_plan.h>

namespace fsdp {

struct FullyShardOptions {
  /// The ranks to shard over. A mesh of one axis shards the parameters over it. A mesh of two
  /// named axes replicates them over the first and shards them over the second (HSDP). The
  /// default is all ranks of the world, on the device of the parameters. For parameters on the
  /// meta device, that is the accelerator if there is one, else the CPU.
  std::optional<DeviceMesh> mesh = {};
  ReshardAfterForward reshard_after_forward = {};
  /// Chooses how to shard each parameter. Without a function, or if it returns nullopt, a
  /// parameter is sharded along dim 0.
  std::function<std::optional<ShardPlacement>(const std::string& fqn, const at::Tensor&)>
      shard_placement_fn = {};
  MixedPrecisionPolicy mp_policy = {};
  AnyOffloadPolicy offload_policy = {};
  /// fully_shard leaves these parameters as they are and does not reduce their gradients.
  std::vector<at::Tensor> ignored_params = {};
  /// Parameters with fewer elements than this are replicated instead of sharded, unless
  /// `shard_placement_fn` places them. Under tensor parallelism the elements of the whole
  /// parameter count. The small parameters form a group of their own: their gradients are
  /// all-reduced, and nothing is gathered. They start with the values of the mesh's first rank,
  /// which are broadcast. 0 turns this off. See docs/performance.md.
  int64_t min_shard_numel = 0;
  /// Says which axes of `mesh` are for data parallelism. All parameters must already be
  /// distributed on `mesh` and replicated over these axes: by distribute_module, or by
  /// parallelize_module over a slice of `mesh`.
  std::optional<DataParallelMeshDims> dp_mesh_dims = {};
};

struct ReplicateOptions {
  /// A mesh of one axis, whose ranks hold the replicas. The default is all ranks of the world.
  std::optional<DeviceMesh> mesh = {};
  MixedPrecisionPolicy mp_policy = {};
  AnyOffloadPolicy offload_policy = {};
  std::vector<at::Tensor> ignored_params = {};
  /// The same option as for fully_shard, but only axes of replicas may be named.
  std::optional<DataParallelMeshDims> dp_mesh_dims = {};
};

class FSDPModule;

namespace detail {
FSDP_API FSDPModule
fully_shard_all(const std::vector<ModuleRef>& modules, const FullyShardOptions& options);
}

/// An all-gather that FSDPModule::unshard has started.
class FSDP_API UnshardHandle {
 public:
  explicit UnshardHandle(std::weak_ptr<detail::FSDPState> state);
  /// Completes the gather: from now on the parameters show their whole values. A second call does
  /// nothing.
  void wait();

 private:
  std::weak_ptr<detail::FSDPState> state_;
  bool waited_ = false;
};

/// A handle to a sharded module, cheap to copy. Its functions throw if the module no longer
/// exists. Setters with `recurse` apply to the sharded modules below this one, too.
class FSDP_API FSDPModule {
 public:
  /// Returns the handle of a module. Throws ValueError if the module is not sharded.
  static FSDPModule of(ModuleRef module);

  /// All-gathers this module's own parameters. With `async_op` the call returns at once with a
  /// handle: the next forward waits by itself, and any other use needs the handle's `wait()`. May
  /// be called before the first forward.
  std::optional<UnshardHandle> unshard(bool async_op = false);
  /// Frees the gathered parameters: they show this rank's shards again.
  void reshard();
  /// Returns true if the gathered parameters are in memory. They may still show their shards.
  bool is_unsharded() const;
  /// Forgets an iteration that was not finished: reshards everything and drops gradients that
  /// were not reduced. Must be called on the root. Not needed after an exception in forward or
  /// backward.
  void reset_iter_state();

  /// False: more backwards follow before the optimizer steps, so backward does not end the
  /// iteration.
  void set_is_last_backward(bool is_last_backward);
  /// False: backward does not reduce gradients. The next backward adds its own to them.
  void set_requires_gradient_sync(bool requires_gradient_sync, bool recurse = true);
  /// False: backward reduces gradients among the shards of each replica, but not over the
  /// replicas (HSDP). The next backward adds its own to them.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  /// Replaces the setting that was given to fully_shard.
  void set_reshard_after_forward(bool reshard_after_forward, bool recurse = true);
  /// False: the parameters stay gathered between microbatches.
  void set_reshard_after_backward(bool reshard_after_backward, bool recurse = true);
  /// False: backward does not gather the parameters, because it does not need them (an
  /// embedding).
  void set_unshard_in_backward(bool unshard_in_backward);

  /// Gather these modules ahead of time, right after this module has been gathered for its
  /// forward or backward. By default, backward gathers the module whose forward ran just before
  /// this one's.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);
  /// The next forward starts to gather after this event. By default it starts after all work that
  /// is in the current stream at that time. Record the event after the optimizer's step.
  void set_post_optim_event(c10::Event event);

  /// Divides gradients by this factor instead of the number of ranks.
  void set_gradient_divide_factor(double factor);
  /// Collectives only sum; the division is done by separate kernels.
  void set_force_sum_reduction_for_comms(bool force_sum);
  /// Parameters that backward did not reach contribute zero gradients. Use it if ranks may use
  /// different parameters, so that all ranks reduce the same ones.
  void set_reduce_scatter_unused_params(bool enable, bool recurse = true);
  /// How many reduce-scatters may be in flight, each with an input buffer. The largest value of
  /// all modules is used. After the first forward it can only grow.
  void set_reduce_scatter_max_input_buffers(int max_input_buffers, bool recurse = true);
  void set_reduce_scatter_max_input_buffers(bool, bool = true) = delete;
  void set_reduce_scatter_max_input_buffers(double, bool = true) = delete;
  /// Uses a separate process group for reductions, so that they do not queue behind gathers.
  /// Collective.
  void set_separate_reduce_scatter_group(bool enable = true, bool recurse = true);

  /// Replace the collectives of this module; see AllGather and ReduceScatter. Both throw ValueError
  /// if the module has several groups of parameters.
  void set_custom_all_gather(std::shared_ptr<AllGather> comm);
  void set_custom_reduce_scatter(std::shared_ptr<ReduceScatter> comm);
  /// `hook` gets the reduced gradients of the group as one flat tensor, before they are added to
  /// the parameters' gradients, and may reduce them further in place. It runs on `stream`, or by
  /// default on the stream of the reduction. Throws ValueError if `stream` is given and the mesh
  /// has replicas.
  void set_all_reduce_hook(
      const std::function<void(at::Tensor&)>& hook, std::optional<c10::Stream> stream = {});
  /// `hook` gets the gradients of each group as soon as a backward has completed them, while it
  /// goes on to the next group. The hook may hand them to a thread that updates the parameters and
  /// clears the gradients; see optim::StepInBackward. An empty function removes the hook. Throws
  /// ValueError if there is one already.
  void set_reduced_grads_hook(const ReducedGradsHook& hook, bool recurse = true);
  /// Takes communication buffers from the process group's own memory, if its backend has such
  /// memory.
  void set_allocate_memory_from_process_group_for_comm(bool enable);
  /// Throws NotImplementedError: symmetric memory needs process groups that torch itself has
  /// registered. The setter above uses memory that NCCL has registered.
  void set_symm_mem_for_comm(const std::string& backend = "NCCL");

  explicit FSDPModule(std::weak_ptr<detail::FSDPState> state);

 private:
  friend FSDP_API void share_comm_ctx(const std::vector<FSDPModule>& modules);

  std::shared_ptr<detail::FSDPState> state() const;
  std::vector<std::shared_ptr<detail::FSDPState>> states(bool recurse) const;
  static std::vector<std::weak_ptr<detail::FSDPState>> states_of(
      const std::vector<FSDPModule>& modules);
  template <class F>
  void for_each_group(bool recurse, F&& set) const;

  std::weak_ptr<detail::FSDPState> state_;
};

/// Returns true if fully_shard or replicate was called on this module itself.
FSDP_API bool is_fsdp_module(ModuleRef module);

/// Shards the parameters at and below `module`, except those that an earlier fully_shard below it
/// has taken. So call it bottom-up: first on the layers, last on the root. The parameters are
/// all-gathered before each forward and backward of the module and freed afterwards, and their
/// gradients are reduce-scattered. The tensors stay the same objects, so an optimizer may be made
/// before or after. The module must be hooked (see FSDP_MODULE) or wrapped in by_call. Every rank
/// must make the same calls.
FSDP_API FSDPModule fully_shard(ModuleRef module, const FullyShardOptions& options = {});

/// Shards several modules as one group, which is gathered when the first of them runs and freed
/// after the last one. A module that is inside another one of the list is covered by it. The
/// group cannot be the root: call fully_shard on a module that contains them all, too.
FSDP_API FSDPModule
fully_shard(std::initializer_list<ModuleRef> modules, const FullyShardOptions& options = {});
template <std::ranges::input_range Range>
  requires(
      std::convertible_to<std::ranges::range_reference_t<Range>, ModuleRef> &&
      !std::convertible_to<Range, ModuleRef>)
FSDPModule fully_shard(Range&& modules, const FullyShardOptions& options = {}) {
  return detail::fully_shard_all({std::ranges::begin(modules), std::ranges::end(modules)}, options);
}

/// Keeps the parameters of `module` whole on every rank and averages their gradients over all
/// ranks, as DistributedDataParallel does. May be combined with fully_shard in one model.
FSDP_API FSDPModule replicate(ModuleRef module, const ReplicateOptions& options = {});

/// Makes all these roots share the first one's streams, buffers and order of communication. For
/// parts of one model that have no common root. An empty list does nothing.
FSDP_API void share_comm_ctx(const std::vector<FSDPModule>& modules);

/// The parameters at and below `module` that are sharded or divided, by name, each one once.
FSDP_API torch::OrderedDict<std::string, DTensor> named_dtensors(ModuleRef module);

/// Returns the plan of the sharded modules at and below `module`, whose forward you call. Runs no
/// step and needs no memory: `module` may be on the meta device.
FSDP_API ShardingPlan sharding_plan(ModuleRef module);

} // namespace fsdp
