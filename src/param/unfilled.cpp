#include "param/unfilled.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>

#include "param/fsdp_param.h"
#include "param/tensor_table.h"

namespace fsdp::detail {

namespace {

constexpr int kBlank = 255;

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
struct UnfilledTensor {
  WeakTensor tensor; // keeps its address from being reused
  int64_t version;
};
TensorTable<UnfilledTensor> unfilled_tensors;
std::atomic<size_t> sweep_at = 1024; // number of entries

/// The tensor's memory as bytes. To write to them does not change the tensor's version.
at::Tensor bytes_of(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), {static_cast<int64_t>(tensor.nbytes())},
      tensor.options().dtype(at::kByte));
}

bool is_blank(const at::Tensor& values) {
  if (values.numel() == 0 || values.is_meta()) {
    return false;
  }
  if (at::isFloatingType(values.scalar_type())) { // a NaN stays NaN when it is cast
    const auto flat = values.reshape(-1);
    return flat[0].to(at::kFloat).isnan().item<bool>() && // cheap, and mostly false
           flat.to(at::kFloat).isnan().all().item<bool>();
  }
  return values.is_non_overlapping_and_dense() && bytes_of(values).min().item<int>() == kBlank;
}

} // namespace

void set_unfilled(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return;
  }
  bytes_of(tensor).fill_(kBlank);
  if (unfilled_tensors.size() >= sweep_at) {
    const auto left =
        unfilled_tensors.sweep([](const auto& entry) { return entry.tensor.expired(); });
    sweep_at = std::max<size_t>(sweep_at, 2 * left);
  }
  unfilled_tensors.set(tensor, {WeakTensor(tensor.getIntrusivePtr()), tensor._version()});
}

bool is_unfilled(const at::Tensor& tensor) {
  const auto version = unfilled_tensors.with(tensor, [](const UnfilledTensor* entry) {
    return entry ? std::optional(entry->version) : std::nullopt;
  });
  if (!version) {
    return false;
  }
  if (const auto* param = FSDPParam::find(tensor)) { // has another version counter by now
    return is_blank(param->was_replaced() ? tensor.detach() : param->sharded());
  }
  return tensor._version() == *version && is_blank(tensor.detach());
}

} // namespace fsdp::detail
