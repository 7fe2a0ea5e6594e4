#pragma once

#include <fsdp/distributed.h>

namespace fsdp::cli {

/// Joins a world of processes and leaves it again. Not for use inside run_ranks.
struct ScopedProcessGroup {
  explicit ScopedProcessGroup(const InitOptions& options) {
    init_process_group(options);
  }
  ~ScopedProcessGroup() {
    destroy_process_group();
  }
  ScopedProcessGroup(const ScopedProcessGroup&) = delete;
  ScopedProcessGroup& operator=(const ScopedProcessGroup&) = delete;
};

} // namespace fsdp::cli
