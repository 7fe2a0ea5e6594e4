#include "mesh_spec.h"

namespace fsdp::python {

DeviceMesh mesh_of(const MeshSpec& spec, const GivenGroup& world) {
  const auto device_type = c10::Device(spec.device_type).type();
  std::vector<ProcessGroup> groups;
  for (size_t i = 0; i < spec.groups.size(); ++i) {
    groups.push_back(group_of(spec.groups[i], spec.group_ranks[i], world, device_type));
  }
  return DeviceMesh::from_groups(device_type, groups, spec.names, spec.ranks);
}

} // namespace fsdp::python
