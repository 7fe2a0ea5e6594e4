#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace fsdp::detail {

/// A view of `flat_numel` elements from `offset` on, as elements of `dtype`. Both numbers count
/// elements of `flat`.
inline at::Tensor typed_view(
    const at::Tensor& flat, int64_t offset, int64_t flat_numel, at::ScalarType dtype) {
  auto view = flat_numel == flat.numel() ? flat : flat.narrow(0, offset, flat_numel);
  return flat.scalar_type() == dtype ? view : view.view(dtype);
}

/// The beginning of a flat run as a tensor of these sizes.
inline at::Tensor shaped(const at::Tensor& run, const std::vector<int64_t>& sizes) {
  return run.narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
}

/// A tensor of these sizes on the memory of `flat` from `offset` on. It is made without operators,
/// because every step makes one for every gradient. For autograd it is not a view.
inline at::Tensor raw_part(
    const at::Tensor& flat, int64_t offset, const std::vector<int64_t>& sizes) {
  TORCH_INTERNAL_ASSERT(offset + c10::multiply_integers(sizes) <= flat.numel());
  auto impl = flat.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(0u), /*allow_tensor_metadata_change=*/true);
  impl->set_storage_offset(flat.storage_offset() + offset);
  impl->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(impl));
}

} // namespace fsdp::detail
