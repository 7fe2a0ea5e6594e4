#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>
#include <fsdp/process_group.h>
#include <fsdp/reduce_op.h>

namespace fsdp {

/// How a group's shards are gathered: replace it for a transport or buffers of
/// your own, by FSDPModule::set_custom_all_gather.
struct FSDP_API AllGather {
  virtual ~AllGather() = default;

  /// A buffer for the output; by default an ordinary tensor.
  virtual at::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions options);

  /// `out` (1D) receives the ranks' `in` (1D) one after another. Called on a
  /// stream on which both may be used. With `async_op` it may return before the
  /// gather is done; the Work is waited for before `out` is read. It fills `out` in
  /// place. The two never overlap: only the default one is given an `in` that is this
  /// rank's part of `out`.
  virtual Work operator()(
      at::Tensor& out, const at::Tensor& in, ProcessGroup& group, bool async_op) = 0;
};

/// How gradients are reduced; set by FSDPModule::set_custom_reduce_scatter.
struct FSDP_API ReduceScatter {
  virtual ~ReduceScatter() = default;

  /// A buffer for the input or the output; by default an ordinary tensor.
  virtual at::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions options);

  /// `in` (1D) holds one part per rank; `out` (1D) receives this rank's,
  /// reduced by `op`. The two never overlap. Otherwise as AllGather.
  virtual Work operator()(
      at::Tensor& out, const at::Tensor& in, ProcessGroup& group, ReduceOp op, bool async_op) = 0;
};

} // namespace fsdp
