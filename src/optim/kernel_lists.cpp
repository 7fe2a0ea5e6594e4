#include "optim/kernel_lists.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>

#include "base/shard_key.h"

// Null if torch was built without OpenMP.
extern "C" __attribute__((weak)) void omp_set_num_threads(int);

namespace fsdp::detail {
namespace {

constexpr int64_t kGrainSize = 32768; // elements: torch's own grain size

/// While this object lives, operators that this thread calls use no other threads.
class SingleThreadGuard {
 public:
  SingleThreadGuard() : num_threads_(at::get_num_threads()) {
    set_num_threads(1);
  }
  ~SingleThreadGuard() {
    set_num_threads(num_threads_);
  }
  SingleThreadGuard(const SingleThreadGuard&) = delete;
  SingleThreadGuard& operator=(const SingleThreadGuard&) = delete;

 private:
  // Does not call at::set_num_threads, which affects other threads too.
  static void set_num_threads(int num_threads) {
    if (omp_set_num_threads != nullptr) {
      omp_set_num_threads(num_threads);
    }
  }
  int num_threads_;
};

at::Tensor with_strides_of(const at::Tensor& like, const at::Tensor& tensor) {
  return tensor.strides() == like.strides() && !tensor.is_neg()
             ? tensor
             : at::empty_like(like).copy_(tensor);
}

} // namespace

void KernelLists::add(
    const at::Tensor& param, const at::Tensor& grad, std::initializer_list<at::Tensor*> state) {
  params_.push_back(param.unsafeGetTensorImpl());
  if (param.numel() == 0) {
    return;
  }
  const bool is_dense = param.is_non_overlapping_and_dense();
  if (!is_dense) {
    copies_.emplace_back(param, at::empty_like(param).copy_(param));
  }
  const auto& dense = is_dense ? param : copies_.back().second;
  auto& lists = param.is_cpu() && param.numel() < kGrainSize ? small_ : lists_;
  lists.resize(2 + state.size());
  lists[0].push_back(dense);
  lists[1].push_back(with_strides_of(dense, grad));
  auto list = lists.begin() + 2;
  for (auto* tensor : state) {
    *tensor = with_strides_of(dense, *tensor);
    (list++)->push_back(*tensor);
  }
}

void KernelLists::run(const Kernel& kernel) {
  at::AutoDispatchBelowADInplaceOrView below; // saves autograd's dispatch for every tensor
  const UnguardedShards unguarded;
  if (!lists_.empty()) {
    kernel(lists_);
  }
  if (!small_.empty()) {
    SingleThreadGuard one;
    kernel(small_);
  }
  for (const auto& [param, updated] : copies_) {
    param.copy_(updated);
  }
  for (auto* param : params_) {
    param->bump_version();
  }
}

} // namespace fsdp::detail
