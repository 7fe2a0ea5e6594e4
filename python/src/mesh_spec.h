#pragma once

#include <fsdp/device_mesh.h>

#include <string>
#include <vector>

#include "process_groups.h"

namespace fsdp::python {

/// A mesh, as Python tells of it: one process group per axis, and the ranks of all.
struct MeshSpec {
  std::string device_type;
  std::vector<GivenGroup> groups;
  std::vector<std::vector<int>> group_ranks;
  std::vector<int> ranks;
  std::vector<std::string> names;
};

/// Needs Python's lock. `world` is the default group.
DeviceMesh mesh_of(const MeshSpec& spec, const GivenGroup& world);

} // namespace fsdp::python
