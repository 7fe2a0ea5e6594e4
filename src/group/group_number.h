#pragma once

#include <fsdp/process_group.h>

#include <cstdint>

namespace fsdp::detail {

/// Returns how many groups of parameters of this kind, a hash of their sizes, the calling rank has
/// made on these ranks before. Ranks make their modules in the same order, so the number tells
/// apart what names do not: the groups of two models that are alike.
int64_t next_group_number(const ProcessGroup& ranks, uint64_t kind);

} // namespace fsdp::detail
