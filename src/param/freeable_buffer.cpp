#include "param/freeable_buffer.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/version.h>

#include <utility>

#include "base/text.h"

namespace fsdp::detail {

FreeableBuffer::FreeableBuffer(
    int64_t numel, const at::TensorOptions& options, const std::string& owner) {
  set_owner(owner);
  // An inference tensor could not be saved for backward later.
  c10::InferenceMode not_inference(false);
  tensor_ = at::empty({0}, options).variable_data();
  nbytes_ = numel * tensor_.element_size();
  tensor_.storage().unsafeGetStorageImpl()->set_nbytes(nbytes_);
  tensor_.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
}

void FreeableBuffer::set_owner(const std::string& owner) {
  message_ = c10::str(
      "fsdp: the parameters of ", module_text(owner),
      " are resharded: their full values are not in memory. Use them inside the module's "
      "forward, or call unshard() first. If backward needs them, do not switch its gather off "
      "(set_unshard_in_backward), and do not reshard() while it runs");
}

void FreeableBuffer::adopt(at::Tensor tensor) {
  auto* from = tensor.storage().unsafeGetStorageImpl();
  TORCH_INTERNAL_ASSERT(
      !allocated_ && from->nbytes() == nbytes_ && tensor.device() == tensor_.device());
  auto memory = from->set_data_ptr(at::DataPtr(nullptr, tensor.device()));
  from->set_nbytes(0);
  lender_ = std::move(tensor);
  auto* storage = tensor_.storage().unsafeGetStorageImpl();
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  storage->clear_data_ptr_access_error_msg_();
#endif
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(nbytes_);
  allocated_ = true;
}

at::Tensor FreeableBuffer::free() {
  auto* storage = tensor_.storage().unsafeGetStorageImpl();
  auto lender = std::exchange(lender_, at::Tensor());
  {
    auto memory = storage->set_data_ptr(storage->allocator()->allocate(0));
    if (lender.defined()) {
      auto* to = lender.storage().unsafeGetStorageImpl();
      to->set_data_ptr_noswap(std::move(memory));
      to->set_nbytes(nbytes_);
    }
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  // The size stays, so that an operator gets as far as the data, whose access gives the message.
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message_);
#else
  storage->set_nbytes(0); // this torch could not clear the message again
#endif
  allocated_ = false;
  return lender;
}

} // namespace fsdp::detail
