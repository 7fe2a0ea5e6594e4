#pragma once

#include <fsdp/comm.h>

#include <memory>
#include <string_view>
#include <utility>

namespace fsdp::detail {

// One object serves all groups, because it has no state.
std::shared_ptr<AllGather> default_all_gather();
std::shared_ptr<ReduceScatter> default_reduce_scatter();

/// Throws ValueError if `flat` is not a contiguous 1D tensor of `numel` elements of `dtype`. A
/// user's function may have allocated or replaced the buffer; `function_name` names this function
/// in the message.
void check_flat(
    const at::Tensor& flat, int64_t numel, at::ScalarType dtype, std::string_view function_name);

/// Like the default ones, but their buffers are allocated by the process group.
std::shared_ptr<AllGather> process_group_all_gather(ProcessGroup group);
std::shared_ptr<ReduceScatter> process_group_reduce_scatter(ProcessGroup group);

} // namespace fsdp::detail
