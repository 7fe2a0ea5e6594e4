#pragma once

#include "process_group/store_factory.h"

namespace fsdp::detail {

// nccl_backend.cpp where torch has CUDA and nccl.h is found, no_nccl.cpp else.

/// Whether NCCL can be used here and now: built in, and a GPU is there.
bool nccl_available();

/// Throws ConfigError that explains why not.
void check_nccl();

/// Makes GPU `local_rank` the calling thread's, unless it has chosen one itself.
void use_gpu(int local_rank);

/// One GPU per rank.
c10::intrusive_ptr<c10d::Backend> make_nccl(const BackendSpec& spec);

} // namespace fsdp::detail
