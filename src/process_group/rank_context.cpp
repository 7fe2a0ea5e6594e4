#include "process_group/rank_context.h"

#include <mutex>
#include <numeric>
#include <utility>

#include "runtime/counting_allocator.h"

namespace fsdp::detail {

namespace {

std::mutex mutex;
std::shared_ptr<RankContext> of_process;
thread_local std::shared_ptr<RankContext> of_thread;

} // namespace

std::shared_ptr<RankContext> make_context(
    std::shared_ptr<BackendFactory> factory, int world_size, int local_rank) {
  std::vector<int> ranks(world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  auto context = std::make_shared<RankContext>();
  context->world = ProcessGroup(factory->group(ranks, ""));
  context->factory = std::move(factory);
  context->local_rank = local_rank;
  return context;
}

std::shared_ptr<RankContext> current_context() {
  return of_thread ? of_thread : process_context();
}

std::shared_ptr<RankContext> process_context() {
  std::lock_guard lock(mutex);
  return of_process;
}

void set_process_context(std::shared_ptr<RankContext> context) {
  std::lock_guard lock(mutex);
  std::swap(of_process, context); // the old context is destroyed after the lock is released
}

void set_thread_context(std::shared_ptr<RankContext> context) {
  count_memory_of_thread(context ? context->memory : nullptr);
  of_thread = std::move(context);
}

} // namespace fsdp::detail
