#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/policy.h>
#include <fsdp/sharding_plan.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/comm.h"
#include "collective/gather.h"
#include "group/flat_layout.h"
#include "observe/live_memory.h"
#include "param/freeable_buffer.h"
#include "param/fsdp_param.h"
#include "param/shard_guard.h"
#include "process_group/observer.h"

namespace fsdp::detail {

/// A parameter that a group will manage: still whole, as the user made it.
struct ParamSpec {
  at::Tensor param;
  std::string name;
  int64_t shard_dim = 0;
  bool opaque = false;     // see FSDPParam
  int64_t merged_dims = 1; // see BlockShard
};

/// Throws if the parameter cannot be in a group. Changes nothing.
void check_shardable(const ParamSpec& spec, const DataParallelMesh& mesh);

/// What the extension of a parameter sends in a gather.
struct SentPayload {
  FSDPParam* param;
  std::shared_ptr<AllGatherExtension> extension;
  AllGatherPayload payload;
};

/// An all-gather of a group's parameters in progress.
struct ParamsGather : PendingGather {
  std::vector<SentPayload> payloads;
};

/// The parameters of one group and their memory: a flat buffer of shards, a flat buffer of whole
/// parameters that can be freed, and the copies between them. The group decides when to copy and
/// free. See Note [Flat layout of a group].
class FlatParams {
 public:
  /// Shards the parameters over `mesh`: each rank keeps its part only. All are on one device.
  /// Dtypes may differ; then the parameters are gathered as bytes.
  FlatParams(
      const std::vector<ParamSpec>& specs,
      const DataParallelMesh& mesh,
      const std::string& owner,
      std::optional<at::ScalarType> param_dtype,
      const AnyOffloadPolicy& offload);
  ~FlatParams();
  FlatParams(const FlatParams&) = delete;
  FlatParams& operator=(const FlatParams&) = delete;

  const std::vector<std::unique_ptr<FSDPParam>>& params() const {
    return params_;
  }
  /// The ranks that hold the other shards.
  const ProcessGroup& ranks() const {
    return ranks_;
  }
  /// True if there is a single rank, which has nothing to communicate.
  bool alone() const {
    return ranks_.size() == 1;
  }
  /// The device of the whole parameters. Shards may be on the host.
  c10::Device device() const {
    return offload_ ? compute_device_ : shard_.device();
  }
  /// The device on which the ranks communicate.
  c10::Device compute_device() const {
    return compute_device_;
  }
  /// This rank's padded shards, in one dimension.
  const at::Tensor& shard() const {
    return shard_;
  }
  /// Where the shards belong.
  c10::Device home() const {
    return offload_ ? c10::Device(c10::kCPU) : compute_device_;
  }
  const std::optional<CPUOffloadPolicy>& offload() const {
    return offload_;
  }
  /// The name that an access to freed memory reports. `model` is the number of the model that the
  /// module belongs to, among those that are alike.
  void set_owner(const std::string& owner, int64_t model);
  /// The number of this group among those with parameters of the same sizes.
  int64_t number() const {
    return number_;
  }
  /// The purpose of a collective of some of the parameters, on which the ranks must agree. It is
  /// the same object as long as the parameters and their names are the same.
  const CollectiveLabel::Purpose& purpose(const std::vector<FSDPParam*>& params) const;
  const CollectiveLabel::Purpose& purpose() const; // of all parameters
  /// Returns parameters, dtypes, bytes and padding, for the log.
  std::string describe() const;
  /// The memory that the parameters take. The plan's traffic is left at 0.
  ShardingPlan::Group plan() const;
  /// The bytes of a gather among neighbours, alignment included.
  int64_t neighbour_gather_bytes() const {
    return whole_ ? static_cast<int64_t>(whole_->tensor().nbytes()) : 0;
  }
  /// Calls `visit` for every tensor that may have memory, shards first. A tensor may be undefined,
  /// and two may share a storage.
  void visit_memory(const MemoryVisitor& visit) const;

  // ---- Shards

  /// True if somebody put another tensor in the place of a shard (Module::to), or changed how it
  /// is sent.
  bool was_changed() const;
  /// Takes over what users hold in the place of shards, see UserParam, unless the whole parameters
  /// are shown. Returns was_changed().
  bool take_replacements();
  /// Moves the parameters' current values into new buffers. The parameters show their shards.
  void build();
  /// Throws if a parameter cannot be trained: it is on the meta device or on a wrong one.
  void check_trainable() const;
  /// Grows when somebody writes to a shard.
  uint64_t shard_version() const;

  // ---- Whole parameters

  /// Starts an all-gather of all shards.
  ParamsGather start_gather(
      const std::shared_ptr<AllGather>& comm, const GatherStreams& streams, SpareMemory& memory);
  /// Makes the gathered parameters the whole ones, on the current stream.
  void take(ParamsGather& gathered, SpareMemory& memory);
  /// Shows the parameters' shards or the whole parameters.
  void show(Face face);
  /// Shows them to users, see UserParam. The engine's tensors stay as they are.
  void show_to_users(Face face);
  Face shown() const {
    return shown_;
  }
  /// Throws if somebody wrote to a whole parameter, because the write would be lost. Throws once
  /// for each write.
  void check_whole_unwritten();
  /// Does the same for writes that move no version counter: those through `.data()`, as
  /// torch::optim::SGD makes them. Compares this rank's part of the whole parameters with its
  /// shards, which must not have been written to since the gather. With `only_steps` it looks only
  /// at parameters that a step can change without an error: their shards broadcast to the whole.
  void check_whole_values(bool only_steps);
  /// The freed memory of whole parameters, and the stream that allocated it. Both are empty if
  /// there is nothing that the caller has to keep.
  struct Freed {
    at::Tensor memory;
    OptionalStream stream;
  };
  Freed free_whole();

  // ---- Parameters divided over neighbouring ranks

  /// Sets over how many neighbouring ranks `divide` divides the parameters. Collective.
  void set_neighbours(int num_ranks);
  /// Keeps this rank's part of the whole parameters, for a gather among its neighbours.
  void divide();
  /// Starts an all-gather of the neighbours' parts.
  ParamsGather start_neighbour_gather(AllGather& comm, const GatherStreams& streams);
  void drop_divided() {
    divided_ = at::Tensor();
  }

  // ---- Offloaded shards

  /// Waits until the copies of shards to the device have ended: the host may write to the shards.
  void wait_for_host_copies();

 private:
  at::ScalarType gather_dtype(const FSDPParam& param) const; // also that of compute
  void check_on_host() const;
  void attach_params();
  void attach_param(size_t k, const at::Tensor& shard);
  std::shared_ptr<const GatherPlan> gather_plan() const;
  const FSDPParam& param_at(int64_t offset) const;
  [[noreturn]] void refuse_write(const FSDPParam& param);
  CollectiveLabel::Purpose make_purpose(const std::vector<FSDPParam*>& params) const;
  void abandon_whole();
  void make_gather_input(ParamsGather& gather, AllGather* allocator);
  std::vector<SentPayload> make_payloads(const at::Tensor& shard) const;
  at::Tensor empty_whole(SpareMemory& memory) const;
  void copy_out_all(const ParamsGather& gathered);
  void copy_out_parts(const ParamsGather& gathered);
  void copy_out_payloads(const ParamsGather& gathered, const std::vector<at::Tensor>& outputs);

  const ProcessGroup ranks_;
  std::vector<std::unique_ptr<FSDPParam>> params_;
  const std::optional<at::ScalarType> param_dtype_; // if empty, each parameter's own
  const std::optional<CPUOffloadPolicy> offload_;
  const c10::Device compute_device_;
  std::string owner_;
  int64_t number_ = 0;
  int64_t model_ = 0;
  // The key is the parameters that take part: usually all of them, or those of one dtype.
  mutable std::map<std::vector<FSDPParam*>, CollectiveLabel::Purpose> purposes_;
  mutable CollectiveLabel::Purpose purpose_; // of all
  FlatLayout layout_;
  std::vector<bool> extended_;         // by parameter: whether the layout was made for an extension
  std::vector<int64_t> gather_numels_; // of the parameters without extension, in layout order
  // A gather by this plan writes the whole parameters at once. Null if a parameter is sent in
  // another form or sharded along another dim, or if nobody would use the plan.
  std::shared_ptr<const GatherPlan> plan_;
  bool backend_places_ = false; // the process group can gather by the plan

  at::Tensor shard_;
  std::unique_ptr<GuardedShards> guard_;
  uint64_t earlier_writes_ = 0;         // to shards that were replaced since
  std::optional<FreeableBuffer> whole_; // empty if the shard is the whole
  OptionalStream whole_stream_;         // the one on which a placed gather allocated the memory
  // Views of `whole_` in layout order, with one row per rank. Undefined for dims other than 0.
  std::vector<at::Tensor> gather_targets_;
  Face shown_ = Face::Sharded;
  Face shown_to_users_ = Face::Sharded;
  bool told_of_write_ = false; // to the whole parameters of the last gather

  ProcessGroup neighbours_;
  at::Tensor divided_; // one dimension: this rank's part, between forward and backward
  StreamEvent copied_in_;
};

} // namespace fsdp::detail
