#pragma once

#include <functional>
#include <optional>
#include <string>

namespace fsdp::detail {

/// What a launcher told this process through its environment.
struct LaunchEnv {
  std::string launcher = "no launcher"; // for messages
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 0; // ranks on this machine; 0: unknown
  std::string master_addr;  // where rank 0 runs; "" when nobody said
  int master_port = 0;      // 0: nobody said
  bool agent_store = false; // the launcher itself serves the store
  int attempt = 0;          // of an elastic restart

  bool one_machine() const;
};

using GetEnv = std::function<std::optional<std::string>(const std::string& name)>;

/// The process's own environment.
std::optional<std::string> process_env(const std::string& name);

/// Understands, in this order: torchrun and `fsdp run` (RANK, WORLD_SIZE),
/// Slurm (srun), Open MPI, and PMI launchers (MPICH, Intel MPI). MASTER_ADDR
/// and MASTER_PORT win over what a launcher implies. Throws ConfigError that
/// names the variable.
LaunchEnv read_launch_env(const GetEnv& get);

/// Throws ConfigError, beginning with `who`, unless `rank` is one of
/// `world_size`.
void check_place(const std::string& who, int rank, int world_size);

/// Fills in where rank 0 serves the store; throws ConfigError that says what
/// to set where nobody said.
void require_master(LaunchEnv& launch);

/// "node[07-08,11]" -> "node07"
std::string first_slurm_host(const std::string& node_list);

} // namespace fsdp::detail
