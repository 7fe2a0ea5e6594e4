#ifndef USE_C10D_NCCL // some torch packages define it
#define USE_C10D_NCCL
#endif
#include "process_group/nccl_backend.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/check.h"

namespace fsdp::detail {

bool nccl_available() {
  return at::cuda::is_available();
}

void check_nccl() {
  FSDP_CHECK_AS(
      ConfigError, nccl_available(), "backend nccl: no GPU is visible to this process; use gloo");
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const BackendSpec& spec) {
  using Nccl = c10d::ProcessGroupNCCL;
  auto options = Nccl::Options::create();
  options->timeout = spec.timeout;
  options->group_name = spec.name;
  options->global_ranks_in_group.assign(spec.world_ranks.begin(), spec.world_ranks.end());
  return c10::make_intrusive<Nccl>(spec.store, spec.rank, spec.size, options);
}

} // namespace fsdp::detail
