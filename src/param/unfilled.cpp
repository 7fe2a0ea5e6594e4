#include "param/unfilled.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "param/fsdp_param.h"

namespace fsdp::detail {

namespace {

constexpr int kBlank = 255;

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
struct Entry {
  WeakTensor tensor; // its address is not given to another one
  int64_t version;
};
// Ranks may be threads, so one table for all of them.
std::mutex table_mutex;
std::unordered_map<const at::TensorImpl*, Entry> table;
size_t sweep_at = 1024;

/// What the tensor's memory holds; writes to it leave the version alone.
at::Tensor bytes_of(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), {static_cast<int64_t>(tensor.nbytes())},
      tensor.options().dtype(at::kByte));
}

bool is_blank(const at::Tensor& values) {
  if (values.numel() == 0 || values.is_meta()) {
    return false;
  }
  if (at::isFloatingType(values.scalar_type())) { // NaN stays NaN when it is cast
    const auto flat = values.reshape(-1);
    return flat[0].to(at::kFloat).isnan().item<bool>() && // mostly not
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
  const Entry entry{WeakTensor(tensor.getIntrusivePtr()), tensor._version()};
  std::lock_guard lock(table_mutex);
  if (table.size() >= sweep_at) {
    std::erase_if(table, [](const auto& item) { return item.second.tensor.expired(); });
    sweep_at = std::max(sweep_at, 2 * table.size());
  }
  table.insert_or_assign(tensor.unsafeGetTensorImpl(), entry);
}

bool is_unfilled(const at::Tensor& tensor) {
  int64_t version = 0;
  {
    std::lock_guard lock(table_mutex);
    const auto found = table.find(tensor.unsafeGetTensorImpl());
    if (found == table.end()) {
      return false;
    }
    version = found->second.version;
  }
  if (const auto* param = FSDPParam::find(tensor)) { // whose counter may be another one by now
    return is_blank(param->was_replaced() ? tensor.detach() : param->sharded());
  }
  return tensor._version() == version && is_blank(tensor.detach());
}

} // namespace fsdp::detail
