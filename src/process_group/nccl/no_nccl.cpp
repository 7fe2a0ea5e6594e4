#include <torch/version.h>

#include "base/check.h"
#include "process_group/nccl/nccl_backend.h"

namespace fsdp::detail {

bool nccl_available() {
  return false;
}

int nccl_version() {
  return 0;
}

bool captures_graph() {
  return false;
}

void check_nccl() {
  FSDP_THROW(
      ConfigError, "backend nccl: this library was built against torch " TORCH_VERSION
                   " without CUDA, or nccl.h was not found; build with FSDP_PYTHON naming an "
                   "interpreter that has a CUDA torch, or use gloo");
}

void use_gpu(int) {
  check_nccl();
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const BackendSpec&) {
  check_nccl();
  return {};
}

} // namespace fsdp::detail
