#pragma once

#include <functional>
#include <optional>
#include <string>

#include <fsdp/init_options.h>

namespace fsdp::detail {

/// The values that a launcher gave this process through environment variables.
struct LaunchEnv {
  std::string launcher = "no launcher"; // for messages
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 0; // ranks on this machine, or about as many; 0: unknown
  std::string master_addr;  // the host of rank 0; "": unknown
  int master_port = 0;      // 0: unknown
  bool agent_store = false; // the launcher serves the store, not rank 0
  int attempt = 0;          // how often torchrun has restarted the ranks

  bool one_machine() const;
};

using GetEnv = std::function<std::optional<std::string>(const std::string& name)>;

/// Reads the environment of this process. An empty variable counts as not set.
std::optional<std::string> process_env(const std::string& name);

/// Recognises, in this order: torchrun and `fsdp run` (RANK, WORLD_SIZE),
/// Slurm (srun), Open MPI, and PMI launchers (MPICH, Intel MPI). MASTER_ADDR
/// and MASTER_PORT override what a launcher implies. Throws ConfigError that
/// names the variable if one is missing or wrong.
LaunchEnv read_launch_env(const GetEnv& get);

/// Replaces the rank and the world size by those that `options` give. Throws ConfigError that names
/// `backend` unless the rank is one of that world.
void override_ranks(LaunchEnv& launch, const InitOptions& options, const std::string& backend);

/// Completes the address and port of the store. Throws ConfigError that says which
/// variable to set if the host of rank 0 is unknown.
void require_master(LaunchEnv& launch);

/// "node[07-08,11]" -> "node07"
std::string first_slurm_host(const std::string& node_list);

} // namespace fsdp::detail
