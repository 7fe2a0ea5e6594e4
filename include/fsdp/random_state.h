#pragma once

#include <fsdp/export.h>
#include <fsdp/state_dict.h>

namespace fsdp {

/// Returns the state of torch's default generators: that of the CPU as "cpu", and that of this
/// rank's accelerator, if there is one, as "cuda" for example. Every rank has its own state, so
/// each value is a DTensor on a mesh of all ranks, with one row of bytes per rank. Without a
/// process group it is a plain tensor with one row. The state can be loaded by the same number of
/// ranks only. With another number, leave it out and seed again. Collective if there is a process
/// group.
FSDP_API StateDict get_random_state();
/// Sets the generators to a state that get_random_state returned, usually after load has filled
/// it. Keys of accelerators that this rank does not have are ignored. Not collective.
FSDP_API void set_random_state(const StateDict& state);

} // namespace fsdp
