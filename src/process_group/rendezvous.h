#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/distributed.h>

#include "process_group/launch_env.h"
#include "process_group/liveness.h"

namespace fsdp::detail {

/// How the ranks of a world met.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store; // none in a world of one
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  std::string address; // of this rank, as its peers reach it
  std::shared_ptr<Liveness> liveness;
};

/// Resolves `options` against `launch`, meets the other ranks, and checks that
/// all agree. A run on one machine listens on the loopback address only.
/// Collective; throws ConfigError or CommError.
Rendezvous meet(const InitOptions& options, const std::string& backend, const LaunchEnv& launch);

} // namespace fsdp::detail
