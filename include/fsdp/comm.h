#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>
#include <fsdp/process_group.h>
#include <fsdp/reduce_op.h>

namespace fsdp {

/// Gathers the shards of a group of parameters. Derive from it to use a transport or buffers of
/// your own; see FSDPModule::set_custom_all_gather.
struct FSDP_API AllGather {
  virtual ~AllGather() = default;

  /// Allocates the output buffer. By default an ordinary tensor.
  virtual at::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions options);

  /// Fills `out` (1D) in place with the `in` (1D) of all ranks, one after another. The current
  /// stream is one on which both tensors may be used. With `async_op` the function may return
  /// before the gather is done: `out` is read only after the returned Work has been waited for.
  /// `out` and `in` do not overlap. (The default implementation alone may get an `in` that is
  /// this rank's part of `out`.)
  virtual Work operator()(
      at::Tensor& out, const at::Tensor& in, ProcessGroup& group, bool async_op) = 0;
};

/// Reduces the gradients of a group of parameters; see FSDPModule::set_custom_reduce_scatter.
struct FSDP_API ReduceScatter {
  virtual ~ReduceScatter() = default;

  /// Allocates the input or the output buffer. By default an ordinary tensor.
  virtual at::Tensor allocate(at::IntArrayRef sizes, at::TensorOptions options);

  /// `in` (1D) holds one part per rank. Fills `out` (1D) with this rank's part, reduced over the
  /// ranks with `op`. `out` and `in` do not overlap. Streams and `async_op` are as for AllGather.
  virtual Work operator()(
      at::Tensor& out, const at::Tensor& in, ProcessGroup& group, ReduceOp op, bool async_op) = 0;
};

/// Sends gradients in a dtype of fewer bits than they are added in: each is rounded once, and their
/// sum is not. The ranks exchange their parts by an all-to-all, and each adds up its own. With
/// `reduce_dtype` fp32 this sends half as much as a usual reduction in fp32. For sums and averages.
struct FSDP_API WideSumReduceScatter : ReduceScatter {
  explicit WideSumReduceScatter(at::ScalarType sent_dtype = at::kBFloat16)
      : sent_dtype(sent_dtype) {}
  Work operator()(
      at::Tensor& out,
      const at::Tensor& in,
      ProcessGroup& group,
      ReduceOp op,
      bool async_op) override;

  const at::ScalarType sent_dtype;
};

} // namespace fsdp
