#include <fsdp/distributed.h>

#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "base/check.h"
#include "launch/launch_env.h"
#include "launch/rendezvous.h"
#include "process_group/fake/fake_backend.h"
#include "process_group/gloo/gloo_backend.h"
#include "process_group/nccl/nccl_backend.h"
#include "process_group/rank_context.h"
#include "process_group/threads/thread_rank.h"

namespace fsdp {

namespace {

using detail::RankContext;

std::string pick_backend(const std::string& asked) {
  if (asked.empty()) {
    return detail::nccl_available() ? "nccl" : "gloo";
  }
  FSDP_CHECK_AS(
      ConfigError, asked == "threads" || asked == "gloo" || asked == "nccl" || asked == "fake",
      "there is no backend '", asked, "'; there are threads, gloo, nccl and fake");
  if (asked == "nccl") {
    detail::check_nccl();
  }
  return asked;
}

std::shared_ptr<RankContext> join_processes(
    const InitOptions& options, const std::string& backend, const detail::LaunchEnv& launch) {
  auto rendezvous = detail::rendezvous(options, backend, launch);
  if (backend == "nccl") {
    detail::use_gpu(launch.local_rank);
  }
  auto factory = std::make_shared<detail::StoreFactory>(
      std::move(rendezvous), backend, options.timeout,
      backend == "nccl" ? detail::make_nccl : detail::make_gloo);
  return detail::make_context(std::move(factory), launch.world_size, launch.local_rank);
}

/// The process that joined a world. A forked child must not end its parent's groups.
pid_t joined_by = 0;

void leave_at_exit() {
  if (const auto context = detail::process_context(); context && joined_by == getpid()) {
    context->factory->end_groups();
  }
}

/// Throws ConfigError if `options` ask for another world than the one that
/// run_ranks has made for this thread.
void check_fits(const RankContext& context, const InitOptions& options) {
  const auto& world = context.world;
  const bool fits = (options.backend.empty() || options.backend == "threads") &&
                    (options.rank < 0 || options.rank == world.rank()) &&
                    (options.world_size < 0 || options.world_size == world.size());
  FSDP_CHECK_AS(
      ConfigError, fits, "[init_process_group] this thread is rank ", world.rank(), " of ",
      world.size(), " of run_ranks (backend threads) and cannot join another world");
}

} // namespace

void init_process_group(const InitOptions& options) {
  if (const auto context = detail::current_context()) {
    TORCH_CHECK(
        context->from_run_ranks,
        "[init_process_group] called twice; call destroy_process_group first");
    check_fits(*context, options);
    return;
  }
  const auto backend = pick_backend(options.backend);
  FSDP_CHECK_AS(
      ConfigError, options.timeout.count() > 0, "the timeout must be positive, not ",
      options.timeout.count(), " ms");
  // Launchers start processes, so threads do not take their ranks.
  auto launch =
      backend == "threads" ? detail::LaunchEnv() : detail::read_launch_env(detail::process_env);
  detail::override_ranks(launch, options, backend);
  if (backend == "threads") {
    detail::join_thread_world(options, launch.rank, launch.world_size);
  } else if (backend == "fake") {
    detail::set_process_context(detail::make_context(
        std::make_shared<detail::FakeFactory>(launch.rank), launch.world_size, launch.rank));
  } else {
    detail::set_process_context(join_processes(options, backend, launch));
    joined_by = getpid();
    // Not by the destructor of a static variable: CUDA may be gone by then.
    static const int at_exit = std::atexit(leave_at_exit);
    (void)at_exit;
  }
}

void destroy_process_group() {
  const auto context = detail::current_context();
  TORCH_CHECK(context, "[destroy_process_group] there is no process group");
  if (context->from_run_ranks) {
    return; // run_ranks itself ends its world
  }
  if (context->membership) {
    detail::set_thread_context(nullptr);
  } else {
    context->factory->end_groups();
    detail::set_process_context(nullptr);
  }
}

int nccl_version() {
  return detail::nccl_version();
}

bool nccl_shares_gpus() {
  constexpr int kFirst = 23000;
  return detail::nccl_version() >= kFirst &&
         detail::process_env("NCCL_MULTI_RANK_GPU_ENABLE") == "1";
}

bool is_initialized() {
  return detail::current_context() != nullptr;
}

int get_rank() {
  return default_group().rank();
}

int get_world_size() {
  return default_group().size();
}

int get_local_rank() {
  (void)default_group();
  return detail::current_context()->local_rank;
}

ProcessGroup default_group() {
  const auto context = detail::current_context();
  TORCH_CHECK(
      context,
      "there is no process group in this thread; call fsdp::init_process_group() first, or run "
      "inside fsdp::run_ranks (a thread that a rank starts itself belongs to no rank)");
  return context->world;
}

} // namespace fsdp
