#pragma once

#include <memory>

namespace fsdp::detail {

/// Marks an object that another thread may change at any time, as long as the result is held. So
/// others can refuse the object without looking inside it.
std::shared_ptr<const void> mark_in_use(const void* object);
bool is_in_use(const void* object);

} // namespace fsdp::detail
