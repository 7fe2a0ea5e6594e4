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
// An all-gather leaves what the ranks sent one behind the other, while a whole
// parameter is made of one part of each: a second pass over all memory, and a
// second buffer. Where parts can be gathered one by one, every one is put where
// it belongs at once:
// - On the CPU our own backends move the bytes themselves, and always do; what
//   other transports gather is copied out by the same plan.
// - On a GPU each part is an operation: a copy (fake), one of a grouped launch
//   (nccl), or as many copies as there are ranks (threads, which therefore leave
//   it). That pays where parts are large, and where they are aligned; else one
//   gather and one copy-out are quicker.
// All ranks must decide alike, so it is decided by what they all know.
// Streams and lifetimes: see Note [Who keeps communication buffers alive].

/// Where the parts of what each rank sends belong. Part p of rank r goes to
/// `out + r * numel` of p, so that the ranks' form one run. What comes last in a
/// run may be padding, for which there is room: it need not be written.
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
/// What one rank sent, on a device: a copy for each part, on the current stream.
void place_on_device(
    const at::Tensor& out, const at::Tensor& in, const GatherPlan& plan, int64_t rank);

/// The same as if all ranks had sent this, on the CPU.
void place_repeated(const at::Tensor& out, const at::Tensor& in, const GatherPlan& plan);

/// On GPUs: where it is worth it, wherever it can be done (`threads` too), or
/// not, which holds for the CPU as well.
enum class PlaceGathers : std::uint8_t { WhereWorthIt, Always, Never };

/// What FSDP_PLACED_GATHERS (auto, always, never) says; tests set it.
std::atomic<PlaceGathers>& place_gathers();

/// Whether the group's backend is to gather tensors of these options by a plan:
/// the same on all ranks.
bool places_gathers(
    const ProcessGroup& group, const GatherPlan& plan, const at::TensorOptions& options);

/// `in` of every rank into its places in `out`. For a group that can.
Work all_gather_placed_async(
    const ProcessGroup& group,
    at::Tensor out,
    at::Tensor in,
    std::shared_ptr<const GatherPlan> plan);

} // namespace fsdp::detail
