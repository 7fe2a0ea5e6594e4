#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace fsdp::detail {

// Note [Freeing by storage]
//
// What autograd saves of an unsharded parameter is a reference to its storage
// object. So between reshard and the next unshard the storage object stays and
// only its memory goes: when it is given some again, its own or that of a gather,
// with the same values, all that was saved is valid again, and nothing had to be told.

/// A flat buffer whose memory can be freed, and allocated or adopted again, in place.
/// All views of it follow. Touching a freed one throws and names the owner (torch 2.13
/// on; before, it is a null pointer).
class FreeableBuffer {
 public:
  /// Has its size but no memory yet: make the views, then call `free`.
  FreeableBuffer(int64_t numel, const at::TensorOptions& options, const std::string& owner);
  void set_owner(const std::string& owner);

  /// 1D, the whole buffer.
  const at::Tensor& tensor() const {
    return tensor_;
  }
  bool allocated() const {
    return allocated_;
  }
  void allocate();
  /// Takes the memory of a tensor of this size and dtype, which has none then. Not
  /// while it has memory.
  void adopt(at::Tensor tensor);
  /// Gives adopted memory back to the tensor that it was taken of, and that to the
  /// caller: it is free when he drops it. Else there is none to return.
  at::Tensor free();

 private:
  void set_memory(at::DataPtr memory);

  at::Tensor tensor_;
  at::Tensor lender_; // of adopted memory
  std::string message_;
  size_t nbytes_ = 0;
  bool allocated_ = false;
};

} // namespace fsdp::detail
