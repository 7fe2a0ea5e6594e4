#pragma once

#include "process_group/store_factory.h"

namespace fsdp::detail {

// Defined in nccl_backend.cpp if torch has CUDA and nccl.h is found, else in no_nccl.cpp.

/// Returns true if NCCL is built in and this process sees a GPU.
bool nccl_available();

/// The version of the library that is loaded: 23203 is 2.32.3. 0 without NCCL.
int nccl_version();

/// Returns true if the current stream is being captured for a CUDA graph.
bool captures_graph();

/// Throws ConfigError with the reason if NCCL is not available.
void check_nccl();

/// Makes GPU `local_rank` the current device of the calling thread, unless the
/// thread has chosen another one than GPU 0 already.
void use_gpu(int local_rank);

/// Makes an NCCL backend. Every rank must have a GPU of its own, unless `nccl_shares_gpus`.
c10::intrusive_ptr<c10d::Backend> make_nccl(const BackendSpec& spec);

} // namespace fsdp::detail
