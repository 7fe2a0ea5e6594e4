#pragma once

#include <fsdp/comm.h>

#include <memory>
#include <string_view>
#include <utility>

namespace fsdp::detail {

// Stateless, and so shared by all groups.
std::shared_ptr<AllGather> default_all_gather();
std::shared_ptr<ReduceScatter> default_reduce_scatter();

/// Throws unless it is still a flat buffer of so many elements of that dtype: of one that
/// users have allocated, or could have replaced. `whose` says which of their functions.
void check_flat(
    const at::Tensor& flat, int64_t numel, at::ScalarType dtype, std::string_view whose);

/// The same with buffers from the process group's own memory.
std::shared_ptr<AllGather> process_group_all_gather(ProcessGroup group);
std::shared_ptr<ReduceScatter> process_group_reduce_scatter(ProcessGroup group);

} // namespace fsdp::detail
