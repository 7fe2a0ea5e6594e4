#pragma once

#include <fsdp/param.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/comm.h"
#include "group/flat_params.h"
#include "group/reduction_queue.h"

namespace fsdp::detail {

/// Turns the gradients of a group's whole parameters into gradients of its shards: averages over
/// all ranks, which are added to the parameters' `.grad`. See Note [Two reductions].
class GradReducer : public std::enable_shared_from_this<GradReducer> {
 public:
  GradReducer(
      FlatParams& flat,
      const std::optional<ProcessGroup>& replicas,
      std::optional<at::ScalarType> reduce_dtype);

  void set_name(const std::string& name) {
    name_ = name;
  }

  /// Adds the reductions of a backward in which every parameter gets a gradient.
  void add_to(ShardingPlan::Group& plan) const;
  /// True if backward has left a gradient that is not reduced yet.
  bool has_grads() const;
  /// Casts the gradients to the dtype of the reduction, in which later microbatches add to them.
  void accumulate();
  /// Starts the reduction of the gradients that backward has left. Collective if there are any.
  /// With `is_last` no other reduction will add to them.
  void start(ReductionQueue& queue, SpareMemory& spare, bool is_last);
  void drop_grads();
  /// Tells the user of the gradients that are complete now. Does nothing without a hook.
  void report_complete();
  /// Waits until offloaded gradients are on the host.
  void wait_for_host_copies();

  // ---- Called by the ReductionQueue

  /// Ends the reduce-scatter. Returns true if an all-reduce over the replicas has to follow.
  /// Otherwise the gradients are in place, or kept as partial sums.
  bool finish_reduce_scatter(Reduction& reduction);
  void start_all_reduce(Reduction& reduction, const OptionalStream& stream);
  void finish_all_reduce(Reduction& reduction, const OptionalStream& stream);

  // ---- Settings

  void set_custom(std::shared_ptr<ReduceScatter> comm);
  bool is_custom() const {
    return is_custom_;
  }
  /// Takes buffers from the memory of the process group.
  void allocate_from_process_group(bool enable);
  /// The hook gets the flat reduced gradients, and may reduce them further. It runs on `stream` if
  /// there is one. Throws ValueError if there is one and there are replicas.
  void set_all_reduce_hook(std::function<void(at::Tensor&)> hook, OptionalStream stream);
  /// The hook is told of gradients that are complete.
  void set_reduced_grads_hook(ReducedGradsHook hook);
  bool has_reduced_grads_hook() const {
    return reduced_grads_hook_ != nullptr;
  }
  /// Throws if the hook has not updated all parameters yet.
  void check_updated() const;
  /// Gives reductions a process group of their own. Collective.
  void set_separate_group(bool enable);

  bool all_reduce_grads = true; // over replicas
  bool reduce_unused_params = false;
  std::optional<double> gradient_divide_factor;
  bool force_sum = false;
  /// The dtype of the reduction. If empty, the gradients' own.
  std::optional<at::ScalarType> reduce_dtype() const {
    return reduce_dtype_;
  }

 private:
  at::ScalarType wire_dtype(const FSDPParam& param) const;
  bool is_reduced(const FSDPParam& param) const;
  Reduction take_grads(at::ScalarType dtype, std::vector<ReduceInput>& inputs) const;
  void start(ReductionQueue& queue, SpareMemory& spare, at::ScalarType dtype, bool is_last);
  void add_grads_alone(
      const Reduction& reduction, const std::vector<ReduceInput>& inputs, at::ScalarType dtype);
  void call_all_reduce_hook(at::Tensor& flat, const OptionalStream& current);
  bool finishes_on_stream(const Reduction& reduction) const;
  void finish_grads(Reduction& reduction);
  void grads_finished(const Reduction& reduction);
  at::Tensor to_shards(const at::Tensor& flat, const Reduction& reduction);

  FlatParams& flat_;
  const std::optional<ProcessGroup> replicas_;
  const std::optional<at::ScalarType> reduce_dtype_;
  std::string name_;
  ProcessGroup group_; // of the reduce-scatters
  std::shared_ptr<ReduceScatter> reduce_scatter_ = default_reduce_scatter();
  bool is_custom_ = false;
  std::function<void(at::Tensor&)> all_reduce_hook_;
  OptionalStream all_reduce_hook_stream_;
  StreamEvent grads_on_host_;
  ReducedGradsHook reduced_grads_hook_;
  std::vector<FSDPParam*> unreported_; // reduced since the hook was called
};

} // namespace fsdp::detail
