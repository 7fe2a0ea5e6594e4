#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

#include <fsdp/init_options.h>

#include "launch/launch_env.h"
#include "launch/liveness.h"

namespace fsdp::detail {

/// The result of a rendezvous: how this rank reaches the others of its world.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store; // null in a world of one
  int rank = 0;
  std::string address;                // under which the peers reach this rank
  std::shared_ptr<Liveness> liveness; // null in a world of one
};

/// Waits for the other ranks and checks that all have the same world size and
/// backend. The rank and the world size are those of `launch`. If all ranks run on
/// one machine, they listen on the loopback address only. Collective. Throws
/// ConfigError or CommError.
Rendezvous rendezvous(const InitOptions& options, const std::string& backend, LaunchEnv launch);

} // namespace fsdp::detail
