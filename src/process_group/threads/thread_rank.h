#pragma once

#include <fsdp/init_options.h>

namespace fsdp::detail {

/// Makes the calling thread rank `rank` of the "threads" world of this process that
/// is named `options.init_method`. The first thread that joins makes the world.
/// Does not wait for the other ranks.
void join_thread_world(const InitOptions& options, int rank, int world_size);

} // namespace fsdp::detail
