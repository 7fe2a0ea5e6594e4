#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>

namespace fsdp::detail {

/// This rank and the number of ranks; 0 and 1 without a process group.
struct World {
  int rank = 0;
  int size = 1;
};
World current_world();
/// Returns the device that the world's collectives work on: the current GPU with nccl, else the
/// CPU. Needs a process group.
c10::Device world_device();

/// Returns a function that tells whether a rank has died; any thread may call it.
/// Returns an empty function if the backend cannot tell. As long as a process
/// keeps the function, its peers see the process as alive, even after it has left
/// the world.
std::function<bool(int rank)> watch_ranks();

/// Makes a connection of its own to the store of the world, through which ranks exchange small
/// values from any thread. (A thread that waits at a connection blocks the others that share it.)
/// Null without a process group, and if the backend has no store.
c10::intrusive_ptr<c10d::Store> world_store();

} // namespace fsdp::detail
