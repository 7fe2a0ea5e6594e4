#include "process_group/threads/thread_operation.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/text.h"
#include "process_group/gather_plan.h"
#include "process_group/reduction.h"

namespace fsdp::detail {

namespace {

void copy_flat(const at::Tensor& target, const at::Tensor& source) {
  if (target.is_cpu()) {
    // Copied as bytes: that needs no dispatch, and starts no intra-op threads next to
    // those of the ranks. In an in-place collective source and target may be the same.
    if (source.nbytes() > 0 && target.data_ptr() != source.const_data_ptr()) {
      std::memmove(target.data_ptr(), source.const_data_ptr(), source.nbytes());
    }
  } else {
    target.copy_(source, /*non_blocking=*/true);
  }
}

/// Returns part `index` of `count` equal parts, flat.
at::Tensor part(const at::Tensor& tensor, int64_t index, int64_t count) {
  const int64_t length = tensor.numel() / count;
  return tensor.view(-1).narrow(0, index * length, length);
}

/// Returns part `index` of an all-to-all buffer, flat.
at::Tensor split_part(
    const at::Tensor& tensor, const std::vector<int64_t>& splits, int64_t index, int64_t count) {
  if (splits.empty()) {
    return part(tensor, index, count);
  }
  const int64_t row = tensor.size(0) == 0 ? 0 : tensor.numel() / tensor.size(0);
  const int64_t start = std::accumulate(splits.begin(), splits.begin() + index, int64_t{0});
  return tensor.view(-1).narrow(0, start * row, splits[index] * row);
}

/// Returns true if the calls of two ranks fit together. `parts_fit` checks the part
/// sizes of an all-to-all.
bool fits(const CollectiveCall& a, const CollectiveCall& b) {
  if (a.kind != b.kind || a.purpose_hash() != b.purpose_hash()) {
    return false;
  }
  if (a.output.defined() && a.output.device().type() != b.output.device().type()) {
    return false;
  }
  switch (a.kind) {
    case CollectiveKind::Barrier:
      return true;
    case CollectiveKind::AllToAll:
      return a.output.scalar_type() == b.output.scalar_type();
    case CollectiveKind::AllGather:
      // A planned output has gaps, so equal outputs do not imply equal inputs.
      if (a.input.numel() != b.input.numel() || !a.plan != !b.plan) {
        return false;
      }
      [[fallthrough]];
    default:
      return a.output.scalar_type() == b.output.scalar_type() &&
             a.output.numel() == b.output.numel() && a.op == b.op && a.root == b.root;
  }
}

bool parts_fit(const std::vector<ThreadCall>& calls) {
  const auto n = static_cast<int64_t>(calls.size());
  for (int64_t to = 0; to < n; ++to) {
    for (int64_t from = 0; from < n; ++from) {
      const auto& receiver = calls[to].call;
      const auto& sender = calls[from].call;
      if (split_part(receiver.output, receiver.out_splits, from, n).numel() !=
          split_part(sender.input, sender.in_splits, to, n).numel()) {
        return false;
      }
    }
  }
  return true;
}

} // namespace

ThreadCall::ThreadCall(CollectiveCall made) : call(std::move(made)) {
  if (call.output.defined() && has_streams(call.output.device())) {
    stream = current_stream(call.output.device());
    ready = StreamEvent::of(stream);
  }
}

std::string ThreadOperation::mismatch(
    const std::vector<ThreadCall>& calls, const std::vector<int>& world_ranks) {
  const auto& first = calls.front().call;
  const bool all_fit = std::all_of(
      calls.begin(), calls.end(), [&](const auto& other) { return fits(first, other.call); });
  if (all_fit && (first.kind != CollectiveKind::AllToAll || parts_fit(calls))) {
    return "";
  }
  std::vector<std::string> lines;
  for (size_t i = 0; i < calls.size(); ++i) {
    lines.push_back(c10::str("rank ", world_ranks[i], ": ", calls[i].call.str()));
  }
  return "the ranks brought different calls: " + join(lines, "; ");
}

void ThreadOperation::run_part(int rank) {
  // The tensors may require gradients or be saved by autograd. As with any c10d
  // backend, autograd must not see what happens to them here.
  c10::InferenceMode not_inference(false);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto& mine = calls_[rank];
  c10::OptionalStreamGuard guard;
  if (mine.stream) {
    guard.reset_stream(*mine.stream);
    for (auto& peer : calls_) {
      peer.ready.block(mine.stream);
    }
  }
  compute(rank);
  mine.done = StreamEvent::of(mine.stream);
}

void ThreadOperation::order_after_parts(int rank) {
  auto& mine = calls_[rank];
  for (auto& peer : calls_) {
    peer.done.block(mine.stream);
  }
}

void ThreadOperation::release() {
  for (auto& each : calls_) {
    each.call = {};
  }
}

void ThreadOperation::compute(int rank) {
  const auto& mine = calls_[rank].call;
  const auto n = static_cast<int64_t>(calls_.size());
  switch (mine.kind) {
    case CollectiveKind::AllGather:
      if (mine.plan && mine.output.is_cpu()) {
        std::vector<const void*> inputs;
        for (const auto& peer : calls_) {
          inputs.push_back(peer.call.input.const_data_ptr());
        }
        copy_parts(mine.output, inputs, *mine.plan);
        break;
      }
      for (int64_t i = 0; i < n; ++i) {
        const auto& input = calls_[i].call.input;
        if (mine.plan) {
          place_on_device(mine.output, input, *mine.plan, i);
        } else {
          copy_flat(part(mine.output, i, n), input.view(-1));
        }
      }
      break;
    case CollectiveKind::ReduceScatter: {
      std::vector<at::Tensor> inputs;
      for (const auto& peer : calls_) {
        inputs.push_back(part(peer.call.input, rank, n));
      }
      reduce_in_order(mine.output.view(-1), inputs, mine.op);
      break;
    }
    case CollectiveKind::AllReduce: {
      // Slice `rank` of every tensor is reduced into rank 0's tensor, then copied to
      // the others.
      const int64_t numel = mine.output.numel();
      const int64_t start = numel * rank / n;
      const int64_t length = numel * (rank + 1) / n - start;
      std::vector<at::Tensor> slices;
      for (const auto& peer : calls_) {
        slices.push_back(peer.call.output.view(-1).narrow(0, start, length));
      }
      reduce_in_order(slices[0], slices, mine.op);
      for (int64_t i = 1; i < n; ++i) {
        copy_flat(slices[i], slices[0]);
      }
      break;
    }
    case CollectiveKind::Broadcast:
      if (rank != mine.root) {
        copy_flat(mine.output, calls_[mine.root].call.output);
      }
      break;
    case CollectiveKind::Scatter:
      copy_flat(mine.output.view(-1), part(calls_[mine.root].call.input, rank, n));
      break;
    case CollectiveKind::AllToAll:
      for (int64_t i = 0; i < n; ++i) {
        const auto& peer = calls_[i].call;
        copy_flat(
            split_part(mine.output, mine.out_splits, i, n),
            split_part(peer.input, peer.in_splits, rank, n));
      }
      break;
    case CollectiveKind::Barrier:
      break;
  }
}

} // namespace fsdp::detail
