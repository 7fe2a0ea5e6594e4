#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace fsdp::detail {

// Note [Freeing by storage]
//
// Autograd saves an unsharded parameter as a reference to its storage object. So the storage object
// stays between reshard and the next unshard, and only its memory is freed. Then it gets other
// memory, with the same values. All saved tensors are valid again, without any change to them.

/// A flat buffer whose memory can be freed, and replaced by that of another tensor. All views of
/// the buffer follow. Access to a freed buffer throws and names the owner; before torch 2.13 the
/// data pointer is null instead.
class FreeableBuffer {
 public:
  /// The buffer has its size but no memory yet. Make the views, then call `free`.
  FreeableBuffer(int64_t numel, const at::TensorOptions& options, const std::string& owner);
  void set_owner(const std::string& owner);

  /// The whole buffer, in one dimension.
  const at::Tensor& tensor() const {
    return tensor_;
  }
  bool allocated() const {
    return allocated_;
  }
  /// Takes the memory of `tensor`, which must have as many bytes and the same device. The buffer
  /// must have no memory before, and `tensor` has none afterwards.
  void adopt(at::Tensor tensor);
  /// Gives the memory back to its tensor, which is returned. The memory is freed when the caller
  /// drops this tensor.
  at::Tensor free();

 private:
  at::Tensor tensor_;
  at::Tensor lender_; // the tensor whose memory was adopted
  std::string message_;
  size_t nbytes_ = 0;
  bool allocated_ = false;
};

} // namespace fsdp::detail
