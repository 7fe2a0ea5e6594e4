#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp::detail {

/// This rank and the number of ranks; 0 and 1 without a process group.
struct World {
  int rank = 0;
  int size = 1;
};
World current_world();
/// Where all ranks communicate; needs a process group.
c10::Device world_device();

/// Whether a rank has died; empty where that cannot be told. For any thread. Who keeps it
/// stays alive to the others, also when its world has ended.
std::function<bool(int rank)> watch_ranks();

/// The text of each rank of the world. Collective.
std::vector<std::string> gather_texts(const std::string& mine);

} // namespace fsdp::detail
