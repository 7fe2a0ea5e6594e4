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

int64_t version_of(const at::Tensor& tensor) {
  const auto* param = FSDPParam::find(tensor);
  return param ? param->shard_version() : tensor._version();
}

/// What the tensor's memory holds; writes to it leave the version alone.
at::Tensor bytes_of(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), {static_cast<int64_t>(tensor.nbytes())},
      tensor.options().dtype(at::kByte));
}

bool is_blank(const at::Tensor& tensor) {
  const auto* param = FSDPParam::find(tensor);
  const auto& values = param && !param->was_replaced() ? param->sharded() : tensor;
  return values.numel() > 0 && values.is_non_overlapping_and_dense() &&
         bytes_of(values).min().item<int>() == kBlank;
}

} // namespace

void set_unfilled(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return;
  }
  bytes_of(tensor).fill_(kBlank);
  const Entry entry{WeakTensor(tensor.getIntrusivePtr()), version_of(tensor)};
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
  return version_of(tensor) == version && is_blank(tensor);
}

} // namespace fsdp::detail
