#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <fsdp/export.h>
#include <fsdp/init_options.h>
#include <fsdp/process_group.h>

namespace fsdp {

/// Joins the calling process to the world. With the backend "threads", joins the calling thread.
/// Collective. Throws ConfigError for invalid options, and CommError if the ranks do not meet or
/// disagree; then nothing is left half-initialised. Inside `run_ranks` the world exists already,
/// and the call only checks that the options fit it.
FSDP_API void init_process_group(const InitOptions& options = {});

/// Leaves the world. Its process groups must not be used afterwards. Over nccl it waits up to three
/// seconds for the other ranks to leave, too, but not while an exception is thrown or if a rank is
/// gone. A program that ends without this call leaves its world in the same way.
FSDP_API void destroy_process_group();

FSDP_API bool is_initialized();
FSDP_API int get_rank();
FSDP_API int get_world_size();
/// This rank's number among the ranks of its machine: use it to choose a GPU.
FSDP_API int get_local_rank();

/// The version of the NCCL library that is loaded: 23203 is 2.32.3. 0 if there is none. It may
/// differ from the version that torch was built with.
FSDP_API int nccl_version();
/// Whether several ranks may use one GPU over nccl. NCCL can do it since 2.30, if the variable
/// NCCL_MULTI_RANK_GPU_ENABLE is 1.
FSDP_API bool nccl_shares_gpus();

/// The process group of all ranks. Throws if there is none.
FSDP_API ProcessGroup default_group();

/// Returns the texts of all ranks, by rank. Collective. With nccl, set the current device before.
FSDP_API std::vector<std::string> gather_texts(const std::string& mine);

struct RunRanksOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Threads that one operator may use, per rank. 0 divides the cores among the ranks: at least
  /// one thread, and at most as many as the caller has.
  int intra_op_threads = 0;
};

/// Runs `body(rank)` in `world_size` threads and waits for all of them. Each thread is a rank
/// with its own default group (backend "threads"). If a rank throws, collectives of the other
/// ranks fail at once, and the first exception is thrown again here, with its rank in the
/// message.
FSDP_API void run_ranks(
    int world_size, const std::function<void(int rank)>& body, const RunRanksOptions& options = {});

} // namespace fsdp
