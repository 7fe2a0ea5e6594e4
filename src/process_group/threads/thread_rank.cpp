#include "process_group/threads/thread_rank.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>
#include <fsdp/distributed.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "process_group/rank_context.h"
#include "process_group/threads/thread_backend.h"
#include "process_group/threads/thread_world.h"

namespace fsdp {

namespace detail {

namespace {

void become_rank(const std::shared_ptr<ThreadWorld>& world, int rank, bool from_run_ranks) {
  world->enter(rank);
  std::shared_ptr<void> membership(world.get(), [world, rank](void*) { world->leave(rank); });
  auto context = make_context(std::make_shared<ThreadFactory>(world, rank), world->size(), rank);
  context->membership = std::move(membership);
  context->from_run_ranks = from_run_ranks;
  context->memory = &new_memory_counter();
  // Backward must run in the rank's own thread, because its hooks call collectives.
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  set_thread_context(std::move(context));
}

[[noreturn]] void rethrow_with_rank(const std::exception_ptr& failure, int rank) {
  const auto where = c10::str("on rank ", rank, " of run_ranks");
  try {
    std::rethrow_exception(failure);
  } catch (c10::Error& error) {
    error.add_context(where); // keeps the exception's type
    throw;
  } catch (...) {
    std::throw_with_nested(c10::Error(
        {__func__, __FILE__, __LINE__}, c10::str(current_exception_text(), " (", where, ")")));
  }
}

} // namespace

void join_thread_world(const InitOptions& options, int rank, int world_size) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<ThreadWorld>> worlds;
  std::shared_ptr<ThreadWorld> world;
  {
    std::lock_guard lock(mutex);
    world = worlds[options.init_method].lock();
    if (!world || world->somebody_left()) { // a world that has ended leaves its name free
      world = std::make_shared<ThreadWorld>(world_size, options.timeout);
      worlds[options.init_method] = world;
    }
  }
  FSDP_CHECK_AS(
      CommError, world->size() == world_size, "the ranks disagree: the threads of world '",
      options.init_method, "' have world size ", world->size(), ", rank ", rank, " has ",
      world_size);
  become_rank(world, rank, /*from_run_ranks=*/false);
}

} // namespace detail

void run_ranks(
    int world_size, const std::function<void(int rank)>& body, const RunRanksOptions& options) {
  TORCH_CHECK_VALUE(world_size >= 1, "[run_ranks] world size ", world_size, " is not positive");
  // Ranks must not race for the first call into the vector math library: that can
  // change the bits of the result.
  at::exp(at::ones(16));
  const int threads_before = at::get_num_threads();
  // By default the ranks share the cores, and a rank has at most as many threads as
  // the caller (see OMP_NUM_THREADS).
  const int num_cores = static_cast<int>(std::thread::hardware_concurrency());
  const int intra_op_threads = options.intra_op_threads > 0
                                   ? options.intra_op_threads
                                   : std::max(1, std::min(threads_before, num_cores / world_size));
  const auto world = std::make_shared<detail::ThreadWorld>(world_size, options.timeout);
  std::mutex mutex;
  std::exception_ptr first_failure;
  int first_rank = -1;
  const auto failed = [&](int rank) { // to be called in a catch block
    std::lock_guard lock(mutex);
    if (!first_failure) {
      first_failure = std::current_exception();
      first_rank = rank;
    }
    world->abort(rank, detail::current_exception_text());
  };
  const auto run = [&](int rank) {
    at::set_num_threads(intra_op_threads);
    try {
      detail::become_rank(world, rank, /*from_run_ranks=*/true);
      body(rank);
    } catch (...) {
      failed(rank);
    }
    detail::set_thread_context(nullptr);
  };
  std::vector<std::thread> threads;
  try {
    for (int rank = 0; rank < world_size; ++rank) {
      threads.emplace_back(run, rank);
    }
  } catch (...) { // the system gives no more threads
    failed(static_cast<int>(threads.size()));
  }
  for (auto& thread : threads) {
    thread.join();
  }
  at::set_num_threads(threads_before); // else later threads would begin with a rank's number
  if (first_failure) {
    detail::rethrow_with_rank(first_failure, first_rank);
  }
}

} // namespace fsdp
