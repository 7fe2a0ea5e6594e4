#pragma once

#include <chrono>
#include <functional>
#include <string>

#include <fsdp/export.h>
#include <fsdp/process_group.h>

namespace fsdp {

struct InitOptions {
  /// "threads", "gloo", "nccl" or "fake"; empty picks nccl where torch has
  /// CUDA and a GPU is there, else gloo.
  std::string backend = {};
  /// "env://": the environment that torchrun, `fsdp run`, Slurm, Open MPI or
  /// another PMI launcher sets; without any of them, a world of one rank.
  /// "tcp://host:port": rank 0 listens there. "file:///path": a fresh file
  /// that every rank sees.
  std::string init_method = "env://";
  /// From the environment when negative (threads: 0 of 1).
  int rank = -1;
  int world_size = -1;
  /// How long a rank waits for its peers, here and in every collective.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// Joins this process (inside `run_ranks`: this thread) to the world.
/// Collective. Throws ConfigError for settings that make no sense, CommError
/// when the ranks do not meet or disagree; nothing is left half-initialised.
/// Inside `run_ranks` the world is there already and the call only checks.
FSDP_API void init_process_group(const InitOptions& options = {});

/// Leaves the world. Not collective. Its groups are not to be used afterwards.
FSDP_API void destroy_process_group();

FSDP_API bool is_initialized();
FSDP_API int get_rank();
FSDP_API int get_world_size();
/// This rank's number on its machine: the GPU to take.
FSDP_API int get_local_rank();

/// The group of all ranks; throws where there is none.
FSDP_API ProcessGroup default_group();

struct RunRanksOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Threads inside one operator, per rank; 0: cores / ranks, at least one.
  int intra_op_threads = 0;
};

/// Runs `body(rank)` in `world_size` threads, each a rank with a default group
/// of its own ("threads" backend), and waits for all. When a rank throws, the
/// others are released from their collectives at once, and the first failure
/// is thrown again here, with its rank.
FSDP_API void run_ranks(
    int world_size, const std::function<void(int rank)>& body, const RunRanksOptions& options = {});

} // namespace fsdp
