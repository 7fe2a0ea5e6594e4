#pragma once

#include <cstdint>
#include <string>

#include "cli/config/train_config.h"
#include "cli/train/free_memory.h"
#include "cli/train/plan.h"

namespace fsdp::cli {

/// The memory that is free for the ranks of one machine.
struct Room {
  FreeMemory host;
  FreeMemory device;            // of one accelerator; not used if ranks train on the CPU
  int64_t ranks = 1;            // on this machine
  int64_t ranks_per_device = 1; // that share an accelerator
};

/// How many of a machine's `ranks` share a device, at most. On the CPU all of them do.
int64_t ranks_per_device(const std::string& device, int64_t ranks);

/// What is free here now. Call it before a rank allocates. `device` is the option.
Room find_room(const std::string& device, int64_t ranks);

/// Whether the plan of a run fits into a room.
struct Fit {
  bool fits = true;
  /// What is needed, and what is free. If it does not fit, also one change with which it would.
  std::string text;
};
Fit judge(const TrainConfig& config, const MeshShape& mesh, const PlanFor& what, const Room& room);

/// Throws ConfigError if the run does not fit, unless `force`.
void check_fit(const Fit& fit, bool force);

} // namespace fsdp::cli
