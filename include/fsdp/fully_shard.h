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
#include <fsdp/policy.h>

namespace fsdp {

struct FullyShardOptions {
  /// One axis, over which parameters are sharded; or two with names, of replicas
  /// and of shards (HSDP). By default all ranks of the world, on the parameters'
  /// device, or the accelerator if there is one for parameters on meta.
  std::optional<DeviceMesh> mesh = {};
  ReshardAfterForward reshard_after_forward = {};
  /// How to shard each parameter; along dim 0 without a function or value.
  std::function<std::optional<ShardPlacement>(const std::string& fqn, const at::Tensor&)>
      shard_placement_fn = {};
  MixedPrecisionPolicy mp_policy = {};
  AnyOffloadPolicy offload_policy = {};
  /// Left alone completely.
  std::vector<at::Tensor> ignored_params = {};
  /// Parameters with fewer elements (of the whole, under tensor parallelism too) stay
  /// whole on every rank, as `replicate` keeps them, unless `shard_placement_fn` places
  /// them: a group of their own, with an all-reduce and no all-gather. They begin with the
  /// values of the mesh's first rank, by one broadcast. See docs/performance.md.
  int64_t min_shard_numel = 0;
  /// `mesh` is then one on which the parameters lie already, replicated over
  /// these axes: by distribute_module, or parallelize_module over a slice of it.
  std::optional<DataParallelMeshDims> dp_mesh_dims = {};
};

struct ReplicateOptions {
  /// One axis, of replicas; by default all ranks of the world.
  std::optional<DeviceMesh> mesh = {};
  MixedPrecisionPolicy mp_policy = {};
  AnyOffloadPolicy offload_policy = {};
  std::vector<at::Tensor> ignored_params = {};
  /// As for fully_shard, with axes of replicas only.
  std::optional<DataParallelMeshDims> dp_mesh_dims = {};
};

class FSDPModule;

namespace detail {
FSDP_API FSDPModule
fully_shard_all(const std::vector<ModuleRef>& modules, const FullyShardOptions& options);
}

/// A gather under way; see FSDPModule::unshard.
class FSDP_API UnshardHandle {
 public:
  explicit UnshardHandle(std::weak_ptr<detail::FSDPState> state);
  /// The parameters show their whole values from here on. A second call does
  /// nothing.
  void wait();

 private:
  std::weak_ptr<detail::FSDPState> state_;
  bool waited_ = false;
};

/// A cheap handle to a sharded module. Throws once the module is gone. Setters
/// with `recurse` reach the sharded modules below too.
class FSDP_API FSDPModule {
 public:
  /// Throws if the module is not sharded.
  static FSDPModule of(ModuleRef module);

  /// Gathers this module's own parameters, or frees them; before the first
  /// forward too. With `async_op` it returns at once: the next forward waits by
  /// itself, anybody else by the handle.
  std::optional<UnshardHandle> unshard(bool async_op = false);
  void reshard();
  /// Whether all values are in memory; the parameters may still show shards.
  bool is_unsharded() const;
  /// Nothing is left pending of an iteration that was broken off. Exceptions in
  /// forward or backward need no such call.
  void reset_iter_state();

  /// False: backward does not end an iteration, more of them follow.
  void set_is_last_backward(bool is_last_backward);
  /// False: backward leaves the gradients unreduced; the next backward adds.
  void set_requires_gradient_sync(bool requires_gradient_sync, bool recurse = true);
  /// False: backward leaves the gradients reduced among the ranks of one replica
  /// only (HSDP); the next backward adds.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  void set_reshard_after_forward(bool reshard_after_forward, bool recurse = true);
  /// False keeps the parameters in memory between microbatches.
  void set_reshard_after_backward(bool reshard_after_backward, bool recurse = true);
  /// False: backward does not need the parameters (an embedding).
  void set_unshard_in_backward(bool unshard_in_backward);

  /// Gather these too, when this module has been gathered for its forward or
  /// backward; backward by default takes the module whose forward came before.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);
  /// The next forward gathers after this event, instead of after all that the
  /// current stream was given: record it behind the optimizer.
  void set_post_optim_event(c10::Event event);

  /// Divide gradients by this instead of the number of ranks.
  void set_gradient_divide_factor(double factor);
  /// Only sums on the wire; divisions by kernels of their own.
  void set_force_sum_reduction_for_comms(bool force_sum);
  /// Parameters that backward did not reach contribute zeros, so that ranks
  /// that use different ones reduce the same.
  void set_reduce_scatter_unused_params(bool enable, bool recurse = true);
  /// How many reductions may be in flight, each with its buffer; the largest of
  /// all modules counts. Before the first forward.
  void set_reduce_scatter_max_input_buffers(int max_input_buffers, bool recurse = true);
  void set_reduce_scatter_max_input_buffers(bool, bool = true) = delete;
  void set_reduce_scatter_max_input_buffers(double, bool = true) = delete;
  /// Reductions do not queue behind gathers. Collective.
  void set_separate_reduce_scatter_group(bool enable = true, bool recurse = true);

  void set_custom_all_gather(std::shared_ptr<AllGather> comm);
  void set_custom_reduce_scatter(std::shared_ptr<ReduceScatter> comm);
  /// Is given the reduced flat gradients, before they become the parameters', to
  /// reduce them further in place; on a stream of its own, unless the mesh has
  /// replicas.
  void set_all_reduce_hook(
      std::function<void(at::Tensor&)> hook, std::optional<c10::Stream> stream = {});
  /// Buffers from the process group's own memory, where its backend has such.
  void set_allocate_memory_from_process_group_for_comm(bool enable);
  /// Throws NotImplementedError: symmetric memory is for the process groups that
  /// torch itself has registered. The setter above takes NCCL's registered memory.
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

FSDP_API bool is_fsdp_module(ModuleRef module);

/// Shards the parameters of `module` that no fully_shard below it has taken:
/// call it bottom-up. They are gathered around each forward and backward, and
/// their gradients reduced; the tensors stay the same objects, so optimizers
/// made before or after work. The module must be hooked (FSDP_MODULE), or
/// wrapped by_call. Every rank must make the same calls.
FSDP_API FSDPModule fully_shard(ModuleRef module, const FullyShardOptions& options = {});

/// Several modules as one group: gathered when the first of them runs, freed
/// after the last. Those that are inside others of the list are covered by
/// them. It cannot be the root: shard a module that contains them too.
FSDP_API FSDPModule
fully_shard(std::initializer_list<ModuleRef> modules, const FullyShardOptions& options = {});
template <std::ranges::input_range Range>
  requires(
      std::convertible_to<std::ranges::range_reference_t<Range>, ModuleRef> &&
      !std::convertible_to<Range, ModuleRef>)
FSDPModule fully_shard(Range&& modules, const FullyShardOptions& options = {}) {
  return detail::fully_shard_all({std::ranges::begin(modules), std::ranges::end(modules)}, options);
}

/// Keeps the parameters of `module` whole on every rank, and averages their
/// gradients over all: data parallel, by the same engine. May be nested with
/// fully_shard in one model.
FSDP_API FSDPModule replicate(ModuleRef module, const ReplicateOptions& options = {});

/// These roots use the streams, buffers and order of the first: for parts of
/// one model that have no common root. An empty list does nothing.
FSDP_API void share_comm_ctx(const std::vector<FSDPModule>& modules);

/// The sharded parameters at and below `module`, by name, each once.
FSDP_API torch::OrderedDict<std::string, DTensor> named_dtensors(ModuleRef module);

} // namespace fsdp
