#ifndef USE_C10D_NCCL // some torch packages define this already
#define USE_C10D_NCCL
#endif
#include "process_group/nccl/nccl_backend.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <dlfcn.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdlib>

#include "base/check.h"
#include "launch/launch_env.h"

namespace fsdp::detail {

bool nccl_available() {
  return at::cuda::is_available();
}

int nccl_version() {
  // Not linked: torch decides which library is loaded.
  auto* const get =
      reinterpret_cast<decltype(&ncclGetVersion)>(dlsym(RTLD_DEFAULT, "ncclGetVersion"));
  int version = 0;
  return get && get(&version) == ncclSuccess ? version : 0;
}

bool captures_graph() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

void check_nccl() {
  FSDP_CHECK_AS(
      ConfigError, nccl_available(), "backend nccl: no GPU is visible to this process; use gloo");
}

void use_gpu(int local_rank) {
  const c10::impl::VirtualGuardImpl gpus(c10::kCUDA);
  if (gpus.getDevice().index() == 0) {
    // A launcher may make only one GPU visible to each rank; then its index is 0.
    const auto index = static_cast<c10::DeviceIndex>(local_rank % gpus.deviceCount());
    gpus.setDevice(c10::Device(c10::kCUDA, index));
  }
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const BackendSpec& spec) {
  using Nccl = c10d::ProcessGroupNCCL;
  // With this setting a collective that fails or hangs aborts its communicator, and
  // the next call throws. By default c10d's watchdog would end the process instead.
  // Variables that the user has set are kept.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", /*overwrite=*/0);
  setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", /*overwrite=*/0);
  if (process_env("TORCH_NCCL_DUMP_ON_TIMEOUT") == "0") {
    // The watchdog waits four times this long for a dump, although none is written.
    setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "100", /*overwrite=*/0);
  }
  auto options = Nccl::Options::create();
  options->timeout = spec.timeout;
  options->group_name = spec.name;
  options->global_ranks_in_group.assign(spec.world_ranks.begin(), spec.world_ranks.end());
  return c10::make_intrusive<Nccl>(spec.store, spec.rank, spec.size, options);
}

} // namespace fsdp::detail
