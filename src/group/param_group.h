#pragma once

#include <fsdp/debug.h>
#include <fsdp/policy.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "group/comm_context.h"
#include "group/flat_params.h"
#include "group/grad_reducer.h"
#include "group/params_state.h"

namespace fsdp::detail {

/// A group's dtypes, where its shards are kept, and whether replicas take over the values of the
/// first replica in the first forward.
struct GroupPolicy {
  MixedPrecisionPolicy precision;
  AnyOffloadPolicy offload;
  bool from_first_replica = false;
};

/// The reason for which a group is unsharded or waited for.
enum class UnshardFor : std::uint8_t {
  Forward,
  ForwardPrefetch, // of a module that runs later
  Backward,
  BackwardPrefetch,
  Recomputation, // of a forward, in backward
  User,
};

/// When a group is resharded.
enum class ReshardAfter : std::uint8_t { Forward, Backward, User };

/// The kind of a backward.
struct BackwardKind {
  bool is_last = true;        // before an optimizer steps
  bool creates_graph = false; // whose own backward needs the whole parameters
};

/// The parameters that are communicated together: one all-gather unshards them, one reduce-scatter
/// reduces their gradients. This class decides when that happens. FlatParams has the parameters'
/// memory, and GradReducer reduces the gradients.
class FSDPParamGroup {
 public:
  FSDPParamGroup(
      const std::vector<ParamSpec>& params,
      const DataParallelMesh& mesh,
      const std::string& name,
      const GroupPolicy& policy = {});

  /// The module's name from the root, after lazy init. Before, its type.
  const std::string& name() const {
    return name_;
  }
  void set_name(const std::string& name, int64_t model, bool one_of_several);
  /// See FlatParams::number.
  int64_t number() const {
    return flat_.number();
  }
  /// Logs one line: parameters, dtypes, bytes and padding.
  void log_layout() const;
  const std::vector<std::unique_ptr<FSDPParam>>& params() const {
    return flat_.params();
  }
  /// Where the shards belong: offloaded ones on the host, others on the device of the mesh.
  c10::Device home() const {
    return flat_.home();
  }
  /// The number of ranks that hold the shards.
  int size() const {
    return flat_.ranks().size();
  }
  ParamsState state() const {
    return state_;
  }
  /// True if the whole parameters are in memory.
  bool is_unsharded() const {
    return modules_see_whole() || state_ == ParamsState::Kept || state_ == ParamsState::Outdated;
  }
  /// The memory that this group takes, and the bytes that a step sends.
  ShardingPlan::Group plan() const;
  /// The process groups over which this group communicates.
  std::vector<ProcessGroup> process_groups() const;
  uint64_t shard_version() const {
    return flat_.shard_version();
  }
  /// Calls `visit` for everything that may have memory. Of tensors that share a storage, the first
  /// one's category counts.
  void visit_memory(const MemoryVisitor& visit) const;

  /// Adopts shards that were replaced, and checks that all parameters can be trained. Idempotent;
  /// called before each gather.
  void lazy_init();
  /// Returns true if somebody has replaced a shard. The next gather adopts it.
  bool take_replacements() {
    return flat_.take_replacements();
  }
  /// Takes over shards that were replaced, if all shards are on one device now. If somebody is
  /// still moving them one by one, the next gather does it.
  void adopt();

  // ---- Parameters

  /// Starts the all-gather, unless one is under way or the parameters are whole already. A gather
  /// that is out of date, because somebody has replaced or written to a shard since, is done again.
  void unshard(UnshardFor purpose);
  /// Completes the gather: the modules see whole parameters. Does nothing if none is under way.
  void wait_for_unshard(UnshardFor purpose);
  /// The modules see shards, and the memory of the whole parameters is free. After forward,
  /// `set_ranks_after_forward` decides.
  void reshard(ReshardAfter when);
  /// Forgets the gather that is under way, if there is one.
  void drop_gather();

  // ---- One iteration

  /// `entering` is false if another module that shares this group is in its forward already.
  void pre_forward(bool entering = true);
  void post_forward();
  void pre_backward();
  /// Starts an unshard that somebody will wait for later.
  void prefetch(UnshardFor purpose);
  /// Reshards, then starts the reduction of the gradients that backward has left: so the whole
  /// parameters are not in memory beside the buffers of the reduction. If backward creates a graph,
  /// the modules go on seeing whole parameters.
  void post_backward(BackwardKind kind);
  /// The modules see shards, unless backward creates a graph. After the last backward no gather is
  /// under way.
  void end_backward(BackwardKind kind);
  /// Forgets a gather that a forward prefetched and nobody used.
  void drop_unused_prefetch();
  /// Waits until offloaded shards have been read, and their gradients written.
  void wait_for_host_copies();
  /// Returns to Sharded after an error, without waiting for peers. Gradients that are not reduced
  /// yet stay.
  void reset();

  // ---- Settings

  /// After forward: 0 keeps the parameters, the group's size frees them, and a number between
  /// divides them over so many neighbouring ranks. Collective.
  void set_ranks_after_forward(int num_ranks);
  void set_custom(std::shared_ptr<AllGather> comm_object);
  /// Takes buffers of collectives from the memory of the process group. Throws if one of the
  /// collectives is custom.
  void allocate_from_process_group(bool enable);
  /// Calls `on_grad` whenever backward brings a gradient of one of the parameters.
  void set_on_grad(const std::function<void()>& on_grad);
  GradReducer& reducer() {
    return *reducer_;
  }

  bool reduce_grads = true;
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  size_t max_input_buffers = 1;
  std::shared_ptr<CommContext> comm = std::make_shared<CommContext>();

 private:
  bool modules_see_whole() const {
    return state_ == ParamsState::Unsharded || state_ == ParamsState::KeptForGraph;
  }
  /// Goes on to the next state, and shows the modules what they see in it.
  void enter(ParamsState next);
  bool is_current();
  void check_no_step();
  void take_first_replica();
  void start_gather(UnshardFor purpose);
  void to_sharded(ReshardAfter when = ReshardAfter::User);
  void show_shards(ReshardAfter when = ReshardAfter::User);
  void keep_whole();
  void divide();
  void free_whole(ReshardAfter when);
  void discard_gather();

  std::string name_;
  std::string label_; // of profiler ranges: " (name)", and the size if one of several
  const std::optional<ProcessGroup> replicas_;
  FlatParams flat_;
  const std::shared_ptr<GradReducer> reducer_;
  std::shared_ptr<AllGather> all_gather_ = default_all_gather();
  bool custom_all_gather_ = false;
  int ranks_after_forward_;
  bool from_first_replica_; // until it was done

  ParamsState state_ = ParamsState::Sharded;
  std::optional<ParamsGather> gather_;         // exactly while Gathering
  UnshardFor gathered_for_ = UnshardFor::User; // of the gather that was started last
  uint64_t gathered_version_ = 0;              // of the shards that the last gather sent
  bool whole_before_forward_ = false;          // before the forward that is running
  // The last member, so that it is destroyed first.
  const LiveMemory live_{[this](const MemoryVisitor& visit) { visit_memory(visit); }};
};

} // namespace fsdp::detail
