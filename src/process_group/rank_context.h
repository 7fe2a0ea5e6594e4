#pragma once

#include <fsdp/process_group.h>

#include <memory>

#include "process_group/group_state.h"

namespace fsdp::detail {

/// A rank's place in its world.
struct RankContext {
  std::shared_ptr<BackendFactory> factory; // keeps every group of the world
  ProcessGroup world;
  int local_rank = 0;
  bool from_run_ranks = false;
  std::shared_ptr<void> place; // ends when the rank leaves; threads only
};

/// A context in a world of `world_size` ranks, connected by `factory`.
std::shared_ptr<RankContext> make_context(
    std::shared_ptr<BackendFactory> factory, int world_size, int local_rank);

/// The calling rank's context: the thread's own, where ranks are threads, else
/// the process's. Null when there is none.
std::shared_ptr<RankContext> current_context();
void set_process_context(std::shared_ptr<RankContext> context);
void set_thread_context(std::shared_ptr<RankContext> context);

} // namespace fsdp::detail
