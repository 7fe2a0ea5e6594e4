#include "collective/reduce.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "collective/comm.h"
#include "collective/copy_pieces.h"

namespace fsdp::detail {

namespace {

int64_t divide_up(int64_t number, int64_t by) {
  return (number + by - 1) / by;
}

/// Returns the gradient with each rank's part as consecutive rows (dim 0).
at::Tensor rank_parts_as_rows(const ReduceInput& input, int64_t num_ranks) {
  const auto& grad = input.grad;
  if (input.shard_dim == 0 || num_ranks == 1) {
    return grad;
  }
  const auto parts = grad.chunk(num_ranks, input.shard_dim);
  const auto length = grad.size(input.shard_dim);
  if (length % num_ranks == 0) {
    return at::cat(parts, /*dim=*/0);
  }
  // One row per rank, with zeros at its end.
  auto rows =
      at::zeros({num_ranks, grad.numel() / length * divide_up(length, num_ranks)}, grad.options());
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    rows[static_cast<int64_t>(rank)]
        .narrow(0, 0, parts[rank].numel())
        .copy_(parts[rank].reshape(-1));
  }
  return rows;
}

/// Writes every rank's rows of every gradient into `flat`, rank after rank, and zeros for missing
/// rows. The gradients are contiguous CPU tensors with the dtype of `flat`. Makes no copies for
/// ranks without rows: if ranks outnumber rows, most have none.
void lay_out_bytes(
    const at::Tensor& flat, const std::vector<at::Tensor>& grads, int64_t num_ranks) {
  auto* to = static_cast<char*>(flat.data_ptr());
  const auto shard_bytes = static_cast<int64_t>(flat.nbytes()) / num_ranks;
  auto complete = num_ranks; // this many ranks have rows of every gradient
  for (const auto& grad : grads) {
    complete = std::min(complete, divide_up(grad.size(0), divide_up(grad.size(0), num_ranks)));
  }
  std::memset(to + complete * shard_bytes, 0, (num_ranks - complete) * shard_bytes);
  for (const auto& grad : grads) {
    const auto bytes = static_cast<int64_t>(grad.nbytes());
    const auto part = divide_up(grad.size(0), num_ranks) * (bytes / grad.size(0));
    const Pieces pieces{
        .to = to,
        .to_step = shard_bytes,
        .from = static_cast<const char*>(grad.const_data_ptr()),
        .from_step = part,
        .size = part,
        .bytes = bytes};
    copy_pieces(pieces);
    const auto last = bytes - (pieces.number() - 1) * part; // bytes in the last piece
    std::memset(to + (pieces.number() - 1) * shard_bytes + last, 0, part - last);
    to += part;
  }
}

/// Does the same for gradients of any device, strides and dtype.
void lay_out(const at::Tensor& flat, const std::vector<at::Tensor>& grads, int64_t num_ranks) {
  const auto dtype = grads.front().scalar_type();
  const bool plain =
      flat.is_cpu() && std::all_of(grads.begin(), grads.end(), [&](const auto& grad) {
        return grad.scalar_type() == dtype && grad.is_contiguous() && !grad.is_neg() &&
               !grad.is_conj();
      });
  if (!plain) {
    auto rows = flat.view({num_ranks, -1});
    at::_chunk_cat_out(rows, grads, /*dim=*/0, num_ranks);
  } else if (dtype == flat.scalar_type()) {
    lay_out_bytes(flat, grads, num_ranks);
  } else {
    // One cast of the whole buffer. _chunk_cat_out would run four operators per gradient instead.
    const auto uncast = at::empty(flat.sizes(), flat.options().dtype(dtype));
    lay_out_bytes(uncast, grads, num_ranks);
    flat.copy_(uncast);
  }
}

} // namespace

PendingReduce start_reduce(
    ReduceScatter& comm, std::vector<ReduceInput>& inputs, const ReduceRequest& request) {
  at::NoGradGuard no_grad;
  auto group = request.group;
  const int64_t num_ranks = group.size();
  std::vector<at::Tensor> grads;
  int64_t shard_numel = 0;
  const auto options = inputs.front().grad.options().dtype(request.reduce_dtype);
  for (const auto& input : inputs) {
    if (input.grad.numel() == 0) {
      continue; // _chunk_cat refuses empty tensors
    }
    grads.push_back(rank_parts_as_rows(input, num_ranks));
    const auto rows = grads.back().size(0);
    shard_numel += divide_up(rows, num_ranks) * (grads.back().numel() / rows);
  }
  inputs.clear();
  PendingReduce reducing;
  const auto allocate = [&](int64_t numel) {
    auto flat = comm.allocate({numel}, options);
    check_flat(flat, numel, request.reduce_dtype, "the reduce-scatter's allocate");
    return flat;
  };
  reducing.input = request.input_memory
                       ? request.input_memory->empty(num_ranks * shard_numel, options)
                       : allocate(num_ranks * shard_numel);
  if (!grads.empty()) {
    lay_out(reducing.input, grads, num_ranks);
  }
  grads.clear();
  wait_for_stream(request.stream, optional_current_stream(reducing.input.device()));
  const c10::OptionalStreamGuard on(request.stream);
  if (request.factors.pre) {
    reducing.input.div_(*request.factors.pre);
  }
  if (num_ranks == 1) { // nothing to scatter: the caller reduces over replicas
    reducing.output = reducing.input;
    return reducing;
  }
  reducing.output = allocate(shard_numel);
  reducing.work = comm(
      reducing.output, reducing.input, group, request.factors.reduce_scatter_op,
      /*async_op=*/true);
  check_flat(reducing.output, shard_numel, request.reduce_dtype, "the reduce-scatter");
  return reducing;
}

at::Tensor finish_reduce(PendingReduce& reducing, const ReduceRequest& request) {
  at::NoGradGuard no_grad;
  reducing.work.wait();
  if (request.factors.post) {
    reducing.output.div_(*request.factors.post);
  }
  return std::move(reducing.output);
}

} // namespace fsdp::detail
