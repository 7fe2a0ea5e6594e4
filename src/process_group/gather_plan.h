#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include <fsdp/process_group.h>

namespace fsdp::detail {

// Note [Placed all-gathers]
//
// An all-gather leaves what the ranks sent one behind the other, while a whole
// parameter is made of one part of each: a second pass over all memory, and a
// second buffer. A backend that moves the bytes itself can put every part where
// it belongs at once. On the CPU ours do; other transports know one destination
// per rank, and their result is copied out by the same plan.

/// Where the parts of what each rank sends belong. Part p of rank r goes to
/// `out + r * numel` of p, so that the ranks' form one run. What comes last in a
/// run may be padding, which is not written.
struct GatherPlan {
  struct Part {
    int64_t in = 0; // offsets and lengths in elements
    int64_t out = 0;
    int64_t numel = 0; // of one rank
    int64_t whole = 0; // of the run, without padding
  };
  std::vector<Part> parts;
  int64_t ranks = 1;
  int64_t in_numel = 0;
  int64_t out_numel = 0; // there may be gaps, which stay as they are
};

/// Puts what the ranks sent, by rank, in its places: bytes, on the CPU. Moves no
/// version counter.
void place(const at::Tensor& out, const std::vector<const void*>& inputs, const GatherPlan& plan);

/// The same as if all ranks had sent this.
void place_repeated(const at::Tensor& out, const at::Tensor& in, const GatherPlan& plan);

/// Whether the group's backend gathers by a plan.
bool places_gathers(const ProcessGroup& group, c10::Device device);

/// `in` of every rank into its places in `out`. For a group that can.
Work all_gather_placed_async(
    const ProcessGroup& group,
    at::Tensor out,
    at::Tensor in,
    std::shared_ptr<const GatherPlan> plan);

} // namespace fsdp::detail
