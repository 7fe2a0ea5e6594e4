#include "group/group_number.h"

#include <map>

#include "process_group/by_group.h"

namespace fsdp::detail {

int64_t next_group_number(const ProcessGroup& ranks, uint64_t kind) {
  static ByGroup<std::map<uint64_t, int64_t>> numbers;
  return numbers.with(ranks, [&](auto& next) { return next[kind]++; });
}

} // namespace fsdp::detail
