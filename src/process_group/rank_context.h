#pragma once

#include <fsdp/process_group.h>

#include <memory>

#include "process_group/group_state.h"
#include "runtime/counting_allocator.h"

namespace fsdp::detail {

/// The objects that a rank keeps while it belongs to a world.
struct RankContext {
  std::shared_ptr<BackendFactory> factory; // owns this rank's groups
  ProcessGroup world;
  int local_rank = 0;
  bool from_run_ranks = false;
  std::shared_ptr<void> membership; // leaves the world when destroyed; null if ranks are processes
  MemoryCounter* memory = nullptr;  // of a rank that is a thread; else that of the process
};

/// Makes a context in a world of `world_size` ranks, whose groups `factory` makes.
std::shared_ptr<RankContext> make_context(
    std::shared_ptr<BackendFactory> factory, int world_size, int local_rank);

/// Returns the calling rank's context. It belongs to the thread if ranks are threads, else to the
/// process. Null if there is none.
std::shared_ptr<RankContext> current_context();
/// Returns the context of the process, also in threads that are ranks. Null if there is none.
std::shared_ptr<RankContext> process_context();
void set_process_context(std::shared_ptr<RankContext> context);
/// The calling thread acts as this rank until it is given null.
void set_thread_context(std::shared_ptr<RankContext> context);

} // namespace fsdp::detail
