#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::detail {

/// Keeps the memory of one freed buffer on the CPU for the next buffer of its size, at most until
/// forward or backward ends. malloc would give large buffers back to the system, and take them
/// again page by page. With that in each group, a step of small layers takes a tenth longer. (A
/// GPU's allocator keeps memory by itself.)
class SpareMemory {
 public:
  /// Returns a tensor with one dimension, in the memory that was kept if that has just this size.
  at::Tensor empty(int64_t numel, const at::TensorOptions& options);
  /// Keeps the buffer's memory, unless somebody else has it, too.
  void keep(at::Tensor buffer);
  void free() {
    kept_ = at::Tensor();
  }
  /// Undefined if there is none.
  const at::Tensor& kept() const {
    return kept_;
  }

 private:
  at::Tensor kept_;
};

} // namespace fsdp::detail
