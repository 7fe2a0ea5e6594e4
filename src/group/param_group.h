#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/debug.h>
#include <fsdp/memory.h>
#include <fsdp/policy.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/comm.h"
#include "collective/divide_factors.h"
#include "collective/gather.h"
#include "collective/reduce.h"
#include "group/comm_context.h"
#include "group/flat_layout.h"
#include "param/freeable_buffer.h"
#include "param/fsdp_param.h"

namespace fsdp::detail {

/// A parameter to be managed, whole, as the user made it.
struct ParamSpec {
  at::Tensor param;
  std::string name;
  int64_t shard_dim = 0;
};

/// In which dtypes a group works, where its shards are, and what they begin with.
struct GroupPolicy {
  MixedPrecisionPolicy precision;
  AnyOffloadPolicy offload;
  bool from_first_replica = false; // its values, as soon as there are any
};

/// Is told of a tensor, and in which member of MemoryStats it counts.
using MemoryVisitor = std::function<void(int64_t MemoryStats::*, const at::Tensor&)>;

/// While it lives, memory_stats looks at the group, on the rank that made it.
class LiveGroup {
 public:
  explicit LiveGroup(const FSDPParamGroup& group);
  ~LiveGroup();
  LiveGroup(const LiveGroup&) = delete;
  LiveGroup& operator=(const LiveGroup&) = delete;

 private:
  const FSDPParamGroup& group_;
};

/// Throws what making a group of it would throw, before anything is changed.
void check_shardable(const ParamSpec& spec, const DataParallelMesh& mesh);

// Note [Where a group's parameters are]
//
//   Sharded              each rank has its shard
//   Unsharded            all of them, in the freeable buffer
//   ShardedPostForward   after a forward with reshard_after_forward = k: the
//                        freeable buffer is divided over k neighbouring ranks,
//                        and backward gathers among these only
//
// The face that parameters show follows, except where memory is kept from one
// backward to the next forward (reshard_after_backward = false): between
// iterations the sharded face is shown, for the optimizer.
enum class ShardedState : std::uint8_t { Sharded, ShardedPostForward, Unsharded };

/// The parameters that are communicated together: one all-gather to unshard
/// them, one reduce-scatter of their gradients. Keeps one flat buffer per
/// face; see Note [Flat layout of a group].
class FSDPParamGroup : public std::enable_shared_from_this<FSDPParamGroup> {
 public:
  /// Shards `params` over `mesh`: each keeps this rank's part only. They are on one device; dtypes
  /// may differ, and are then gathered as bytes.
  FSDPParamGroup(
      const std::vector<ParamSpec>& params,
      const DataParallelMesh& mesh,
      std::string name,
      const GroupPolicy& policy = {});
  ~FSDPParamGroup();

  /// From the root, at lazy init; before, what is known.
  const std::string& name() const {
    return name_;
  }
  void set_name(const std::string& name, bool one_of_several = false);
  /// One line: parameters, dtypes, bytes and padding.
  void log_layout() const;
  const std::vector<std::unique_ptr<FSDPParam>>& params() const {
    return params_;
  }
  /// Where the parameters are gathered; shards may be on the host.
  c10::Device device() const {
    return offload_ ? compute_device_ : shard_.device();
  }
  bool is_unsharded() const {
    return sharded_state_ == ShardedState::Unsharded;
  }
  ShardedState sharded_state() const {
    return sharded_state_;
  }
  /// Moves when a shard is written to: by an optimizer, for example.
  uint64_t shard_version() const;
  /// Everything that may have memory. Some are undefined, and some share a
  /// storage, which counts in the first one's category.
  void visit_memory(const MemoryVisitor& visit) const;

  /// Whether somebody put something else in the place of a shard (Module::to),
  /// or changed how it is sent.
  bool was_changed() const;
  /// Adopts that, and checks that all can be trained. Idempotent; before each
  /// gather.
  void lazy_init();

  // ---- Gather

  /// Starts the all-gather, unless one is pending or the group is unsharded.
  void unshard(bool async_op = false, bool for_recomputation = false);
  /// Completes it: the parameters show their unsharded face. Nothing to do
  /// where nothing is pending.
  void wait_for_unshard();
  /// The parameters show their sharded face and the gathered memory is free;
  /// after forward, as `post_forward_ranks` says.
  void reshard();

  // ---- One iteration, as the state calls it

  /// `entering`: the first of the modules that share this group.
  void pre_forward(bool entering = true);
  void post_forward();
  /// False if it had been called already.
  bool pre_backward();
  /// An unshard that somebody will wait for later, in the given state.
  void prefetch(TrainingState state);
  /// Reduces the gradients that backward has left and adds them to the
  /// parameters' `.grad`, by and by. Reshards first, so that parameters and
  /// gradients are not in memory together with the buffers. Collective if any
  /// parameter has a gradient.
  void post_backward();
  bool has_unsharded_grads() const;
  /// Ends the oldest of this group's reductions; see Note [Two reductions].
  void finish_reduce_scatter();
  void finish_all_reduce();
  /// The sharded face is shown. After the last backward, nothing is pending.
  void end_backward(bool is_last);
  /// Forgets a gather that nobody waited for.
  void drop_pending();
  void drop_unused_prefetch();
  /// Offloaded shards have been read, and gradients written: they are the
  /// host's again.
  void wait_for_host_copies();
  /// Sharded, with nothing pending. Gradients that were not reduced yet stay,
  /// unless dropped.
  void reset();
  void drop_grads();

  // ---- Settings

  /// After forward: 0 keeps the parameters, the group's size frees them, and a
  /// number between divides them over so many neighbouring ranks.
  void set_post_forward_ranks(int ranks);
  int size() const {
    return group_.size();
  }
  void set_custom(std::shared_ptr<AllGather> comm_object);
  void set_custom(std::shared_ptr<ReduceScatter> comm_object);
  /// Refused where one of them is custom.
  void allocate_from_process_group(bool enable);
  /// Is given the flat reduced gradients, to reduce them further; on a stream
  /// of its own, if given. Refused with a stream where there are replicas.
  void set_all_reduce_hook(std::function<void(at::Tensor&)> hook, OptionalStream stream);
  /// A process group of its own for reductions. Collective.
  void set_separate_reduce_scatter_group(bool enable);

  /// `on_late_grad` is called for a gradient that comes in a backward that no
  /// hook has announced: of a loss of the parameters alone, for example.
  void set_on_late_grad(const std::function<void()>& on_late_grad);

  TrainingState training_state = TrainingState::Idle;
  bool reduce_grads = true;
  bool all_reduce_grads = true; // over replicas
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  bool reduce_scatter_unused_params = false;
  size_t max_input_buffers = 1;
  std::optional<double> gradient_divide_factor;
  bool force_sum_reduction = false;
  std::optional<at::ScalarType> reduce_dtype; // else the gradients'
  std::shared_ptr<CommContext> comm = std::make_shared<CommContext>();

 private:
  struct Reduction {
    Reducing reducing;
    ReduceRequest request;
    std::vector<FSDPParam*> params;
    bool all_reduce = true;
    bool grads_are_enqueued = false; // behind the reduce-scatter, on its stream
  };
  /// What extensions sent in the gather that is pending.
  struct Payload {
    FSDPParam* param;
    std::shared_ptr<AllGatherExtension> extension;
    AllGatherPayload payload;
  };

  void build();
  void discard_pending();
  void forget_pending();
  void attach_params();
  void take_first_replica();
  std::shared_ptr<const GatherPlan> gather_plan() const;
  void check_host_memory() const;
  at::Tensor gather_input(at::Tensor* buffer);
  int64_t make_payloads(const at::Tensor& shard);
  void copy_out_all();
  void copy_out_payloads(std::vector<at::Tensor> outputs);
  void to_sharded();
  void to_sharded_post_forward();
  void free_unsharded();
  void abandon_unsharded();
  void show(Face face);
  /// Of the whole parameter, and so of compute.
  at::ScalarType gather_dtype(const FSDPParam& param) const;
  /// In which its gradient is reduced.
  at::ScalarType wire_dtype(const FSDPParam& param) const;
  bool is_reduced(const FSDPParam& param) const;
  void reduce_all();
  void reduce(at::ScalarType dtype);
  void start_all_reduce(Reduction reduction);
  static void add_partial_grads(const Reduction& reduction);
  static void keep_partial_grads(const Reduction& reduction);
  void call_all_reduce_hook(at::Tensor& flat, const OptionalStream& current);
  void finish_grads(Reduction& reduction);
  bool finishes_on_stream(const Reduction& reduction) const;
  at::Tensor to_shards(const at::Tensor& flat, const Reduction& reduction);
  /// Nothing to communicate.
  bool alone() const {
    return group_.size() == 1;
  }

  std::string name_;
  std::string label_; // of ranges: " (name)", and the size of one of several
  const DataParallelMesh mesh_;
  const ProcessGroup group_; // of the shards
  const std::optional<ProcessGroup> replicate_group_;
  ProcessGroup reduce_group_;
  std::vector<std::unique_ptr<FSDPParam>> params_;
  ShardedState sharded_state_ = ShardedState::Sharded;
  Face shown_ = Face::Sharded;
  bool was_unsharded_ = false;  // before the forward that is running
  bool maybe_outdated_ = false; // an optimizer may have stepped since the gather
  int post_forward_ranks_;
  ProcessGroup post_forward_group_; // where that is less than all
  std::shared_ptr<AllGather> all_gather_ = default_all_gather();
  std::shared_ptr<ReduceScatter> reduce_scatter_ = default_reduce_scatter();
  bool custom_all_gather_ = false;
  bool custom_reduce_scatter_ = false;
  std::function<void(at::Tensor&)> all_reduce_hook_;
  OptionalStream all_reduce_hook_stream_;

  const std::optional<at::ScalarType> param_dtype_; // else the parameters' own
  const std::optional<CPUOffloadPolicy> offload_;
  const c10::Device compute_device_; // of offloaded ones
  bool from_first_replica_;          // until it was done
  FlatLayout layout_;
  std::vector<bool> extended_;         // by parameter, as the layout was made for
  std::vector<int64_t> gather_numels_; // of the plain ones, in the layout's order
  // Of the whole group: null where some are sent in another form or along another
  // dim, and on devices with streams where nobody gathers by it.
  std::shared_ptr<const GatherPlan> plan_;
  bool places_ = false; // the backend gathers by it

  at::Tensor shard_;                        // 1D: the padded shards
  std::optional<FreeableBuffer> unsharded_; // 1D; none where it is the shard itself
  OptionalStream unsharded_stream_;         // that its memory was allocated on, where a gather did
  // In the layout's order: (ranks, part numel) views; undefined for other dims than 0.
  std::vector<at::Tensor> gather_targets_;
  at::Tensor post_forward_shard_; // 1D
  std::optional<Gathered> pending_;
  bool prefetched_ = false; // by a forward, not by the user
  std::vector<Payload> payloads_;
  std::deque<Reduction> reduce_scatters_;
  std::deque<Reduction> all_reduces_;
  // Of offloaded groups: copies between host and device that were started.
  StreamEvent copied_in_;
  StreamEvent grads_on_host_;
  const LiveGroup live_{*this}; // last, so that it ends first
};

} // namespace fsdp::detail
