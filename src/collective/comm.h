#pragma once

#include <fsdp/comm.h>

#include <memory>
#include <utility>

namespace fsdp::detail {

// Stateless, and so shared by all groups.
std::shared_ptr<AllGather> default_all_gather();
std::shared_ptr<ReduceScatter> default_reduce_scatter();

/// The same with buffers from the process group's own memory.
std::shared_ptr<AllGather> process_group_all_gather(ProcessGroup group);
std::shared_ptr<ReduceScatter> process_group_reduce_scatter(ProcessGroup group);

} // namespace fsdp::detail
