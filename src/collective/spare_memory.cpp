#include "collective/spare_memory.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <utility>

namespace fsdp::detail {

at::Tensor SpareMemory::empty(int64_t numel, const at::TensorOptions& options) {
  auto kept = std::exchange(kept_, at::Tensor());
  if (kept.defined() && kept.numel() == numel && kept.dtype() == options.dtype() &&
      kept.device() == options.device()) {
    return kept;
  }
  kept = at::Tensor(); // first, so that both buffers are never there at once
  const c10::InferenceMode not_inference(false); // the memory may be kept for training
  return at::empty({numel}, options);
}

void SpareMemory::keep(at::Tensor buffer) {
  const bool is_ours = buffer.defined() && buffer.is_cpu() && buffer.use_count() == 1 &&
                       buffer.storage().use_count() == 1;
  kept_ = is_ours ? std::move(buffer) : at::Tensor();
}

} // namespace fsdp::detail
