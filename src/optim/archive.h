#pragma once

#include <ATen/core/Tensor.h>
#include <torch/serialize/archive.h>

namespace fsdp::detail {

// Optimizers read their state from archives and write it to them with these functions.

inline torch::IValue read_value(torch::serialize::InputArchive& archive, const char* name) {
  torch::IValue value;
  archive.read(name, value);
  return value;
}

/// Writes the tensor if it is defined.
inline void write_tensor(
    torch::serialize::OutputArchive& archive, const char* name, const at::Tensor& tensor) {
  if (tensor.defined()) {
    archive.write(name, tensor, /*is_buffer=*/true);
  }
}

/// Reads the tensor. It is undefined afterwards if the archive does not have it.
inline void read_tensor(
    torch::serialize::InputArchive& archive, const char* name, at::Tensor& tensor) {
  tensor.reset();
  archive.try_read(name, tensor, /*is_buffer=*/true);
}

} // namespace fsdp::detail
