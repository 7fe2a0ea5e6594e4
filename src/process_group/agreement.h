#pragma once

#include "process_group/collective_call.h"
#include "process_group/group_state.h"

namespace fsdp::detail {

/// Throws CommError if the ranks of a group call different collectives; the
/// message lists every rank's call. gloo does not check this itself: it reduces
/// mismatched tensors to garbage or ends the process. The check is a small
/// all-gather that waits for the peers. So by default only the first calls of a
/// group are checked: nearly all such mistakes show there.
/// FSDP_CHECK_COLLECTIVES=all checks every call, =none checks no call.
/// Not checked here: our own backends (`threads` has its own check, `fake` has no
/// peers) and calls on a GPU, because the check would wait for the GPU.
void check_agreement(GroupState& group, const CollectiveCall& call);

} // namespace fsdp::detail
