#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <unordered_map>

namespace fsdp::detail {

/// A map from tensors to values, by the address of their TensorImpl. One table serves all ranks of
/// the process, and a lock guards it, because ranks may be threads.
template <class Value>
class TensorTable {
 public:
  /// Returns false if the tensor has an entry already.
  bool add(const at::Tensor& tensor, Value value) {
    std::lock_guard lock(mutex_);
    return values_.emplace(tensor.unsafeGetTensorImpl(), std::move(value)).second;
  }
  void set(const at::Tensor& tensor, Value value) {
    std::lock_guard lock(mutex_);
    values_.insert_or_assign(tensor.unsafeGetTensorImpl(), std::move(value));
  }
  void remove(const at::Tensor& tensor) {
    std::lock_guard lock(mutex_);
    values_.erase(tensor.unsafeGetTensorImpl());
  }
  /// Calls `use` with a pointer to the tensor's entry, or with null, and returns its
  /// result. No other thread changes the table meanwhile.
  template <class Use>
  auto with(const at::TensorImpl* tensor, const Use& use) const {
    std::lock_guard lock(mutex_);
    const auto found = values_.find(tensor);
    return use(found == values_.end() ? nullptr : &found->second);
  }
  template <class Use>
  auto with(const at::Tensor& tensor, const Use& use) const {
    return with(tensor.unsafeGetTensorImpl(), use);
  }
  /// Removes the entries for which `is_dead` holds; returns how many are left.
  template <class IsDead>
  size_t sweep(const IsDead& is_dead) {
    std::lock_guard lock(mutex_);
    std::erase_if(values_, [&](const auto& item) { return is_dead(item.second); });
    return values_.size();
  }
  size_t size() const {
    std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Value> values_;
};

} // namespace fsdp::detail
