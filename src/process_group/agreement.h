#pragma once

#include "process_group/collective_call.h"
#include "process_group/group_state.h"

namespace fsdp::detail {

/// Makes sure that every rank brings the same collective, before a backend is
/// given what it cannot check: gloo reduces mismatched tensors to garbage, or
/// ends the process. Costs a small all-gather, which waits for the peers, so by
/// default only the first calls of a group are checked, where nearly all such
/// mistakes show. FSDP_CHECK_COLLECTIVES=all checks every call, =none no call.
/// Our own backends check by themselves; calls on a device are not checked,
/// since that would wait for it. Throws CommError that says what each brought.
void check_agreement(GroupState& group, const CollectiveCall& call);

} // namespace fsdp::detail
