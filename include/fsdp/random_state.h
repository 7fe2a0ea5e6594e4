#pragma once

#include <fsdp/export.h>
#include <fsdp/state_dict.h>

namespace fsdp {

/// The state of torch's default generators, of the CPU and of this rank's accelerator
/// where there is one: "cpu", "cuda". Every rank has its own, so each is a DTensor
/// with one row of bytes per rank, on a mesh of all ranks. A checkpoint of it fits
/// the same number of ranks; with another number leave it out, and seed anew.
/// Collective where there is a world.
FSDP_API StateDict get_random_state();
/// Takes what get_random_state gave, and load has filled. Keys of accelerators that
/// this rank does not have are left alone. Not collective.
FSDP_API void set_random_state(const StateDict& state);

} // namespace fsdp
