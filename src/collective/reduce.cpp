#include "collective/reduce.h"

#include <ATen/ATen.h>

#include <utility>

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

} // namespace

Reducing start_reduce(std::vector<ReduceInput>& inputs, const ReduceRequest& request) {
  at::NoGradGuard no_grad;
  const int64_t num_ranks = request.group.size();
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
  reducing.input = at::empty({num_ranks, shard_numel}, options);
  if (!grads.empty()) {
    at::_chunk_cat_out(reducing.input, grads, /*dim=*/0, num_ranks);
  }
  grads.clear();
  if (request.factors.pre) {
    reducing.input.div_(*request.factors.pre);
  }
  reducing.output = at::empty({shard_numel}, reducing.input.options());
  reducing.work = request.group.reduce_scatter_async(
      reducing.output, reducing.input, request.factors.reduce_scatter_op);
  return reducing;
}

at::Tensor finish_reduce(Reducing& reducing, const ReduceRequest& request) {
  at::NoGradGuard no_grad;
  reducing.work.wait();
  reducing.input = at::Tensor();
  auto result = std::move(reducing.output);
  if (request.factors.post) {
    result.div_(*request.factors.post);
  }
  return result.to(request.result_dtype);
}

} // namespace fsdp::detail
