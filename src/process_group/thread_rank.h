#pragma once

#include <memory>

#include <fsdp/distributed.h>

#include "process_group/rank_context.h"
#include "process_group/thread_world.h"

namespace fsdp::detail {

/// Makes the calling thread rank `rank` of the "threads" world that threads of
/// this process form under the name `options.init_method`; the first to come
/// makes it. Does not wait for the others.
void join_thread_world(const InitOptions& options, int rank, int world_size);

} // namespace fsdp::detail
