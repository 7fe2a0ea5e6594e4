#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace fsdp::detail {

/// `numel` elements of `dtype` from `offset` on, in elements of `flat`.
inline at::Tensor typed_view(
    const at::Tensor& flat, int64_t offset, int64_t flat_numel, at::ScalarType dtype) {
  auto view = flat.narrow(0, offset, flat_numel);
  return flat.scalar_type() == dtype ? view : view.view(dtype);
}

/// The beginning of a flat run as a tensor of these sizes.
inline at::Tensor shaped(const at::Tensor& run, const std::vector<int64_t>& sizes) {
  return run.narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
}

} // namespace fsdp::detail
