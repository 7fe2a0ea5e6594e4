#include "runtime/object_in_use.h"

#include <mutex>
#include <unordered_set>

namespace fsdp::detail {

namespace {

std::mutex marks_mutex;
std::unordered_multiset<const void*> marks;

} // namespace

std::shared_ptr<const void> mark_in_use(const void* object) {
  {
    const std::lock_guard lock(marks_mutex);
    marks.insert(object);
  }
  return {object, [](const void* marked) {
            const std::lock_guard lock(marks_mutex);
            marks.erase(marks.find(marked));
          }};
}

bool is_in_use(const void* object) {
  const std::lock_guard lock(marks_mutex);
  return marks.contains(object);
}

} // namespace fsdp::detail
