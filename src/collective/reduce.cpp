#include "collective/reduce.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "collective/over_ranks.h"

namespace fsdp::detail {

namespace {

/// The gradient with the rows of each rank together: as it is for dim 0.
at::Tensor by_rows(const ReduceInput& input, int64_t num_ranks) {
  if (input.shard_dim == 0 || num_ranks == 1) {
    return input.grad;
  }
  TORCH_INTERNAL_ASSERT(input.grad.size(input.shard_dim) % num_ranks == 0);
  return at::cat(input.grad.chunk(num_ranks, input.shard_dim), /*dim=*/0);
}

/// Every rank's rows of every gradient, rank after rank, and zeros for the rows
/// that are missing: contiguous ones of one dtype, on the CPU.
void lay_out_bytes(
    const at::Tensor& flat, const std::vector<at::Tensor>& grads, int64_t num_ranks) {
  struct Rows {
    const char* from;
    int64_t bytes; // of all of them
    int64_t part;  // of one rank, padded
  };
  std::vector<Rows> all;
  for (const auto& grad : grads) {
    const auto bytes = static_cast<int64_t>(grad.nbytes());
    const auto padded_rows = (grad.size(0) + num_ranks - 1) / num_ranks;
    all.push_back(
        {static_cast<const char*>(grad.const_data_ptr()), bytes,
         padded_rows * (bytes / grad.size(0))});
  }
  const auto numel = flat.numel() / num_ranks;
  auto* base = static_cast<char*>(flat.data_ptr());
  const auto shard_bytes = numel * static_cast<int64_t>(flat.element_size());
  over_ranks(num_ranks, numel, [&](int64_t rank) {
    auto* to = base + rank * shard_bytes;
    for (const auto& rows : all) {
      const auto before = std::min(rank * rows.part, rows.bytes);
      const auto bytes = std::min(rows.part, rows.bytes - before);
      std::memcpy(to, rows.from + before, bytes);
      std::memset(to + bytes, 0, rows.part - bytes);
      to += rows.part;
    }
  });
}

/// The same for all, with a cast.
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
    // The operator above asks four more of every gradient; this is one cast of all.
    const auto uncast = at::empty(flat.sizes(), flat.options().dtype(dtype));
    lay_out_bytes(uncast, grads, num_ranks);
    flat.copy_(uncast);
  }
}

} // namespace

Reducing start_reduce(
    ReduceScatter& comm, std::vector<ReduceInput>& inputs, const ReduceRequest& request) {
  at::NoGradGuard no_grad;
  auto group = request.group;
  const int64_t num_ranks = group.size();
  std::vector<at::Tensor> grads;
  int64_t shard_numel = 0;
  const auto options = inputs.front().grad.options().dtype(request.reduce_dtype);
  for (const auto& input : inputs) {
    if (input.grad.numel() == 0) {
      continue; // _chunk_cat refuses these, and they have nothing to say
    }
    grads.push_back(by_rows(input, num_ranks));
    const auto rows = grads.back().size(0);
    const auto padded_rows = (rows + num_ranks - 1) / num_ranks;
    shard_numel += padded_rows * (grads.back().numel() / rows);
  }
  inputs.clear();
  Reducing reducing;
  reducing.input = comm.allocate({num_ranks * shard_numel}, options);
  if (!grads.empty()) {
    lay_out(reducing.input, grads, num_ranks);
  }
  grads.clear();
  wait_for_stream(request.stream, optional_current_stream(reducing.input.device()));
  const c10::OptionalStreamGuard on(request.stream);
  if (request.factors.pre) {
    reducing.input.div_(*request.factors.pre);
  }
  if (num_ranks == 1) { // for the replicas
    reducing.output = reducing.input;
    return reducing;
  }
  reducing.output = comm.allocate({shard_numel}, options);
  reducing.work = comm(
      reducing.output, reducing.input, group, request.factors.reduce_scatter_op,
      /*async_op=*/true);
  return reducing;
}

at::Tensor finish_reduce(Reducing& reducing, const ReduceRequest& request) {
  at::NoGradGuard no_grad;
  reducing.work.wait();
  if (request.factors.post) {
    reducing.output.div_(*request.factors.post);
  }
  return std::move(reducing.output);
}

} // namespace fsdp::detail
