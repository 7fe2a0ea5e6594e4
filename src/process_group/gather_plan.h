#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <fsdp/process_group.h>

namespace fsdp::detail {

// Note [Placed all-gathers]
//
// An ordinary all-gather writes the ranks' inputs one behind the other. But a
// whole parameter consists of one part from each rank, so a copy-out must follow:
// a second pass over all memory and a second buffer. A placed all-gather writes
// each part directly to its final position:
// - On the CPU our own backends copy the bytes themselves, so they place by default.
//   What other backends gather is copied out by the same plan.
// - On a GPU each part is one operation: one copy (fake), one all-gather of a
//   grouped launch (nccl), or one copy per rank (threads, which by default do not
//   place for that reason). That is faster if the parts are large and, for nccl,
//   aligned. Otherwise one all-gather and one copy-out are faster.
// All ranks must decide alike, so the decision depends only on what all ranks know.
// Streams and lifetimes: see Note [Who keeps communication buffers alive].

/// Says where the parts of each rank's input go in the output of an all-gather. A part of rank r
/// goes to `out + r * numel`, so the ranks' parts form one run, which is the whole parameter. A run
/// may end with padding. The output has room for the padding, but the padding need not be written.
struct GatherPlan {
  /// Offsets and lengths are in elements.
  struct Part {
    int64_t in = 0;
    int64_t out = 0;
    int64_t numel = 0;          // of one rank
    int64_t unpadded_numel = 0; // of all ranks together, without padding
  };
  std::vector<Part> parts;
  int64_t ranks = 1;
  int64_t in_numel = 0;
  int64_t out_numel = 0; // includes gaps between the runs, which are not written
};

/// Copies the ranks' inputs to their places in `out`. All memory is on the CPU.
/// Does not change the version counter of `out`.
void copy_parts(
    const at::Tensor& out, const std::vector<const void*>& inputs, const GatherPlan& plan);
/// Copies the input of one rank to its places in `out`, which is on a device: one
/// copy per part, on the current stream.
void place_on_device(
    const at::Tensor& out, const at::Tensor& in, const GatherPlan& plan, int64_t rank);

/// Like `copy_parts`, as if every rank had sent `in`.
void place_repeated(const at::Tensor& out, const at::Tensor& in, const GatherPlan& plan);

/// Says when to place all-gathers. WhereWorthIt places them on a GPU if that is faster. Always
/// places them on a GPU if the backend can, `threads` too. Never places none, on a GPU or on the
/// CPU.
enum class PlaceGathers : std::uint8_t { WhereWorthIt, Always, Never };

/// Returns the value of FSDP_PLACED_GATHERS (auto, always, never). Tests change it.
std::atomic<PlaceGathers>& place_gathers();

/// Returns true if the group is to place all-gathers with this plan and these
/// tensor options. All ranks get the same answer.
bool places_gathers(
    const ProcessGroup& group, const GatherPlan& plan, const at::TensorOptions& options);

/// Gathers every rank's `in` to its places in `out`. Only for a group whose
/// backend can place.
Work all_gather_placed_async(
    const ProcessGroup& group,
    at::Tensor out,
    at::Tensor in,
    std::shared_ptr<const GatherPlan> plan);

} // namespace fsdp::detail
