#pragma once

#include <fsdp/device_mesh.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

#include "interpreter.h"

namespace fsdp::python {

// Note [Collectives of Python's groups]
//
// The engine talks to the groups of the user's DeviceMesh. It calls c10d::ProcessGroup and not the
// backend below, so that its collectives pass torch's dispatcher: CommDebugMode counts them, the
// profiler names them, and groups that are written in Python work.
//
// The ranks also compare their calls, once per step (see Note [Ranks that agree]). These
// comparisons go to the backend itself, because nobody who counts collectives has asked for them.

using GivenGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Returns the engine's group over a group of Python, always the same one. Needs Python's lock.
/// `world_ranks` are its members, and `world` is the default group.
ProcessGroup group_of(
    const GivenGroup& group,
    const std::vector<int>& world_ranks,
    const GivenGroup& world,
    c10::DeviceType device_type);

/// The group of Python behind one of the engine's.
GivenGroup given_group(const ProcessGroup& group);

/// Makes the default group the engine's world, for functions that are collective over the world.
/// Needs Python's lock. All ranks share `store`. `device_type` is that of tensors that the group
/// can send.
void enter_world(
    const GivenGroup& world,
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::string& device_type);

/// There is no world any more, for functions that would be collective over it.
void leave_world();

/// Sets the function that makes a group of Python for a list of world ranks.
void set_new_group(py::object function);

} // namespace fsdp::python
