#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include <fsdp/process_group.h>

#include "collective/divide_factors.h"
#include "collective/gather.h"
#include "param/freeable_buffer.h"
#include "param/fsdp_param.h"

namespace fsdp::detail {

/// A parameter to be managed, whole, as the user made it.
struct ParamSpec {
  at::Tensor param;
  std::string name;
  int64_t shard_dim = 0;
};

/// The parameters that are communicated together: one all-gather to unshard
/// them, one reduce-scatter of their gradients. Keeps one flat buffer per
/// face; see Note [Flat layout of a group].
class FSDPParamGroup {
 public:
  /// Shards `params` over `group`: each keeps this rank's part only. They are
  /// on one device; dtypes may differ, and are then gathered as bytes.
  FSDPParamGroup(const std::vector<ParamSpec>& params, ProcessGroup group, std::string name);

  const std::string& name() const {
    return name_;
  }
  std::vector<FSDPParam>& params() {
    return params_;
  }
  bool is_unsharded() const {
    return shown_ == Face::Unsharded;
  }

  // ---- Runtime

  /// Starts the all-gather, unless one is pending or the group is unsharded.
  void unshard();
  /// Completes it: the parameters show their unsharded face. Nothing to do
  /// where nothing is pending.
  void wait_for_unshard();
  /// The parameters show their sharded face and the gathered memory is free.
  void reshard();

  /// Reduces the gradients that backward has left and adds them to the
  /// parameters' `.grad`. Reshards first, so that parameters and gradients are
  /// not in memory together with the buffers. Collective if any parameter has a
  /// gradient.
  void reduce_grads();
  bool has_unsharded_grads() const;

  /// Forgets an all-gather that nobody waited for.
  void drop_pending();
  /// Sharded, with nothing pending and no gradient left to reduce.
  void reset();

  // ---- Settings

  std::optional<double> gradient_divide_factor;
  bool force_sum_reduction = false;
  std::optional<at::ScalarType> reduce_dtype; // else the gradients'

 private:
  /// Where a parameter lies in the flat buffers, in elements of these.
  struct Part {
    int64_t shard_offset = 0;
    int64_t numel = 0; // padded, per rank
    int64_t unsharded_offset = 0;
  };

  void lay_out();
  void attach_params(const at::TensorOptions& options);
  void show(Face face);
  void copy_out_all();
  void reduce_grads_of(at::ScalarType dtype);
  at::ScalarType reduce_dtype_for(const at::Tensor& grad) const {
    return reduce_dtype.value_or(grad.scalar_type());
  }
  /// Nothing to gather or reduce: both faces share their memory.
  bool alone() const {
    return group_.size() == 1;
  }

  const std::string name_;
  const ProcessGroup group_;
  std::vector<FSDPParam> params_;
  Face shown_ = Face::Sharded;

  at::ScalarType gather_dtype_ = at::kFloat; // bytes where dtypes differ
  std::vector<size_t> order_;                // of the parameters in the flat buffers
  std::vector<Part> parts_;                  // by parameter
  int64_t unsharded_numel_ = 0;
  std::optional<GatherLayout> layout_;

  at::Tensor shard_;                        // 1D: the padded shards
  std::optional<FreeableBuffer> unsharded_; // 1D; none when alone
  // By place in `order_`: (ranks, part numel) views; undefined for other dims than 0.
  std::vector<at::Tensor> gather_targets_;
  std::optional<Gathered> pending_;
};

} // namespace fsdp::detail
